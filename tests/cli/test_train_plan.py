"""The plan of a K3-sized run: known figures, and a refusal of what cannot fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from conftest import dspark
from dspark.cli.console import Screen
from dspark.cli.context import RunContext
from dspark.cli.train_plan import TrainPlan, TrainPlanner, train_plan
from dspark.config.load import load_recipe

K3 = Path(__file__).parents[2] / "recipes" / "kimi-k3.yaml"


def planned(*overrides: str) -> tuple[TrainPlanner, TrainPlan]:
    run = RunContext(load_recipe(K3, overrides), "", Screen(Console(quiet=True)))
    planner = train_plan(run)
    return planner, planner.plan()


def test_figures_of_a_k3_run_are_what_arithmetic_says() -> None:
    planner, plan = planned()
    assert plan.token_bytes == 86_016  # (5 taps + 1 final) x 7168 x 2 bytes
    length = 8192
    # Taps of every token, final states of the supervised half, 13 bytes of ids and the like.
    row = length * (5 * 7168 * 2 + 13) + (4096 + 1) * 7168 * 2 + 2048
    assert plan.step_bytes == 512 * row
    assert plan.window_bytes == 64 * row
    assert plan.steps == -(-10 * 400_000 // 512)
    assert plan.run_bytes == 10 * 400_000 * row
    assert plan.memory["master weights"] * 8 == pytest.approx(4 * 2_387_907_841, rel=1e-8)
    assert plan.memory["optimiser"] == 2 * plan.memory["master weights"]
    assert planner.faults(plan) == []
    assert plan.trainer_rate is not None
    assert plan.network_gbit == pytest.approx(
        min(plan.trainer_rate, 4 * 30_000) * row / length * 8 / 1e9
    )


def test_loss_memory_follows_the_chunk_and_not_the_vocabulary_times_rows() -> None:
    _, plan = planned("train.loss.chunk_rows=2400")
    _, wide = planned("train.loss.chunk_rows=3584")
    logits = 512 * 7 * 163_840 * 4  # 2.19 GiB: all rows of one sequence at once
    assert plan.memory["loss"] < wide.memory["loss"]
    assert wide.memory["loss"] - plan.memory["loss"] == pytest.approx(
        3 * logits * (3584 - 2400) / 3584, rel=0.01
    )


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.batch_size=16", "train.accumulate=32"], "a rank needs"),
        (["train.stream.pool_gb=40"], "below one optimiser window"),
        (["cluster.host_gb=400"], "on one host"),
        (["cluster.network_gbit=10"], "the network carries"),
        (["train.accumulate=500"], "do not share"),
    ],
)
def test_what_cannot_fit_is_refused(overrides: list[str], part: str) -> None:
    planner, plan = planned(*overrides)
    assert any(part in fault for fault in planner.faults(plan)), planner.faults(plan)


def test_the_command_prints_bytes_first_and_exits_with_2_when_it_cannot_fit() -> None:
    done = dspark("train", str(K3), "--plan", "cluster.network_gbit=10")
    assert done.returncode == 2
    assert "86,016 + ids" in done.stdout
    assert "the network carries 10" in done.stderr
