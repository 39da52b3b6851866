"""The engine's statistics pass on the engine as it is, and convict engines that are slightly wrong."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import dspark
from dspark.decoding.processors import LogitRules
from dspark.decoding.verify import Decisions, decide_many
from dspark.engine import settle
from dspark.engine.admission import Admission
from dspark.engine.drafter import Drafter
from dspark.engine.selftest import (
    Case,
    all_cases,
    chi_square,
    exact_joint,
    run_case,
    stream_overlap,
    tiny_pair,
)

SOUND, WRONG = 1e-4, 1e-8


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


def test_every_mode_meets_every_setting() -> None:
    cases = all_cases()
    assert len({c.name for c in cases}) == len(cases)
    modes = {(c.verification, c.draft) for c in cases}
    assert ("block", "greedy") not in modes
    assert len(modes) == 3
    assert len({c.setting for c in cases}) == 6
    for scheduler in ("fixed", "threshold", "sync", "async"):
        assert {(c.verification, c.draft) for c in cases if c.scheduler == scheduler} == modes


def test_the_exact_joint_is_a_distribution(pair) -> None:
    for case in all_cases()[:6]:
        joint = exact_joint(pair[0], case.params)
        assert sum(joint.values()) == pytest.approx(1, abs=1e-6)
        assert all(len(t) == 5 or t[-1] == 0 for t in joint)


# The other modes under schedulers are part of `dspark verify`.
SCHEDULED = [
    i for i, c in enumerate(all_cases()) if c.scheduler != "fixed" and c.verification == "block"
]


@pytest.mark.parametrize("index", [0, 7, 16, 17, 20, *SCHEDULED])
def test_the_engine_emits_the_targets_distribution(pair, index: int) -> None:
    result = run_case(pair, all_cases()[index], 3000)
    assert result.p_value > SOUND, result
    assert result.cells > 15
    assert result.acceptance_length > (1.1 if result.case.scheduler == "fixed" else 1.0)


def test_a_rejection_that_falls_back_to_the_target_is_convicted(pair, monkeypatch) -> None:
    def wrong(rule, p, q, ids, u):
        accepted = decide_many(rule, p, q, ids, u).accepted
        return Decisions(accepted, p[torch.arange(len(p)), accepted].double())

    monkeypatch.setattr(settle, "decide_many", wrong)
    assert run_case(pair, Case("standard", "probabilistic", "top_p"), 4000).p_value < WRONG


@pytest.mark.slow
def test_rules_that_forget_the_drafted_prefix_are_convicted(pair, monkeypatch) -> None:
    sound = LogitRules.apply

    def wrong(self, logits, output, drafted, first=0, support=None):
        return sound(self, logits, output, [], first, support)

    case = Case("block", "probabilistic", "penalties and bias")
    joint = exact_joint(pair[0], case.params)
    monkeypatch.setattr(LogitRules, "apply", wrong)
    monkeypatch.setattr("dspark.engine.selftest.exact_joint", lambda *_: joint)
    assert run_case(pair, case, 6000).p_value < WRONG


def test_an_argmax_draft_tested_against_softmax_is_convicted(pair, monkeypatch) -> None:
    sound = Drafter._choose

    def wrong(logits, k, blocks, groups, uniforms):
        sound(logits, k, blocks, groups, uniforms)
        return logits.argmax(-1)

    monkeypatch.setattr(Drafter, "_choose", staticmethod(wrong))
    case = Case("standard", "probabilistic", "temperature 1")
    assert run_case(pair, case, 4000).p_value < WRONG


def test_a_scheduler_that_looks_at_the_drawn_tokens_is_convicted(pair, monkeypatch) -> None:
    def peeking(self, tokens, blocks, signals):
        for block in blocks.values():
            block.admit(0 if block.ids[:1] == [1] else len(block.ids))

    monkeypatch.setattr(Admission, "admit", peeking)
    case = Case("standard", "probabilistic", "temperature 1")
    assert run_case(pair, case, 6000).p_value < WRONG


def test_impossible_texts_give_no_chance_at_all() -> None:
    assert chi_square({(9,): 1, (1,): 99}, {(1,): 1.0})[2] == 0.0


def test_streams_of_requests_are_disjoint() -> None:
    twice, correlation = stream_overlap(16, 2000)
    assert twice == 0
    assert correlation < 6 / 2000**0.5


def test_the_command_refuses_what_proves_nothing() -> None:
    few = dspark("verify", "--samples", "10")
    assert few.returncode == 2
    assert "1000" in few.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_command_proves_everything(tiny_run) -> None:
    import subprocess
    import sys

    from conftest import environment

    done = subprocess.run(
        [sys.executable, "-m", "dspark", "verify", str(tiny_run / "draft"), "--json",
         "--samples", "5000"],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["max_joint_error"] <= 1e-12
    assert found["schedulers"]["max_joint_error"] <= 1e-12
    assert found["schedulers"]["names"] == ["fixed", "threshold", "sync", "async"]
    assert found["min_p_value"] >= 1e-4
    assert found["samples"] >= 100_000
    assert found["identity"]["identical"] == found["identity"]["prompts"] == 8
    assert len(found["cases"]) == len(all_cases())
