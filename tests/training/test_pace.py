"""Time ends a run when it is up, and the schedule with it, whatever the machine does meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.training.checkpoint import FILE, TrainingState
from dspark.training.optim import learning_rate
from dspark.training.pace import RESERVE, TIMED_STEPS, Pace
from dspark.training.trainer import Trainer

Cost = Callable[[float], float]


def ride(
    seconds: Cost, *, limit: float | None = 100.0, full: int = 10_000, pause: float = 0.0
) -> tuple[TrainingState, list[tuple[float, float]]]:
    """A run whose step at time t takes ``seconds(t)``; every tenth is evaluated for ``pause``.

    Returns its end and (progress, learning rate) of every step.
    """
    section = tiny_section(max_seconds=limit, learning_rate=1.0, warmup_ratio=0.04)
    state = TrainingState(0, full, 0.0, 0.0, {"steps": [], "evals": []})
    pace = Pace(section, full, state)
    now, seen = 0.0, []
    while state.step < state.total:
        position = pace.position(state)
        seen.append((position / state.total, learning_rate(section, position, state.total)))
        took = seconds(now)
        now += took
        state.seconds = now
        pace.advance(state, took)
        if pause and (state.step % 10 == 0 or state.step == state.total):
            now += pause
            pace.pause(pause)
        else:
            pace.pause(0.0)
    state.seconds = now
    return state, seen


def steady(each: float) -> Cost:
    return lambda t: each


MACHINES: dict[str, Cost] = {
    "steady": steady(0.2),
    "slow first step": lambda t: 5.0 if t == 0 else 0.2,
    "three times slower after half": lambda t: 0.2 if t < 50 else 0.6,
    "ten times slower near the end": lambda t: 0.2 if t < 85 else 2.0,
    "three times faster after a third": lambda t: 0.6 if t < 33 else 0.2,
    "stalls for ten seconds now and then": lambda t: 10.2 if int(t) % 30 == 29 else 0.2,
    "noisy": lambda t: 0.05 + 0.3 * ((t * 7919.0) % 1.0),
    "slower and slower": lambda t: 0.1 * math.exp(t / 40),
    "steps of a tenth of the time": steady(9.0),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_ends_in_time_with_the_schedule_at_its_end(machine: str) -> None:
    state, seen = ride(MACHINES[machine])
    progress = [p for p, _ in seen]
    assert all(b > a for a, b in pairwise(progress))
    assert 80 <= state.seconds <= 105
    # The last of n steps has the rate of place n - 1 of n: small, and near zero in a long run.
    assert seen[-1][0] >= 1 - 1 / len(seen) - 1e-9
    assert seen[-1][1] <= (0.002 if len(seen) > 100 else 0.04)


@pytest.mark.parametrize(
    "machine", ["steady", "slow first step", "three times slower after half",
                "three times faster after a third", "slower and slower"]
)  # fmt: skip
def test_the_rate_comes_down_gently(machine: str) -> None:
    """No step takes more than three hundredths of the schedule: nothing is jumped over."""
    progress = [p for p, _ in ride(MACHINES[machine])[1]]
    assert max(b - a for a, b in pairwise(progress)) < 0.03
    # The warm-up is not eaten by a slow first step.
    assert sum(p < 0.04 for p in progress) >= TIMED_STEPS


def test_evaluations_are_part_of_the_time(tmp_path: Path) -> None:
    state, seen = ride(steady(0.2), pause=3.0)
    assert 80 <= state.seconds <= 101
    assert seen[-1][1] < 0.01
    assert max(b[0] - a[0] for a, b in pairwise(seen)) < 0.05
    long, _ = ride(steady(0.2), pause=20.0)
    assert long.seconds <= 120, "one evaluation of a fifth of the time may still be under way"


def test_a_step_that_would_end_too_late_is_not_begun() -> None:
    state, _ = ride(steady(28.0), limit=60.0)
    assert (state.step, state.total) == (2, 2)
    assert state.seconds == 56
    state, _ = ride(steady(200.0), limit=60.0)
    assert state.step == 1


def test_without_a_limit_the_clock_does_not_matter() -> None:
    slow, a = ride(steady(1e6), limit=None, full=100)
    fast, b = ride(steady(1e-9), limit=None, full=100)
    assert a == b
    assert [p for p, _ in a] == [i / 100 for i in range(100)]
    assert slow.total == fast.total == 100


def test_enough_time_leaves_the_epochs_as_they_are() -> None:
    state, seen = ride(steady(0.2), full=300)
    assert state.total == state.step == 300
    assert [p for p, _ in seen] == pytest.approx([i / 300 for i in range(300)])


# --- in the trainer ------------------------------------------------------------------------------

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 10)


class Clock:
    """Every look at it costs ``each`` seconds."""

    def __init__(self, each: float) -> None:
        self.each, self.now = each, 1000.0

    def __call__(self) -> float:
        self.now += self.each
        return self.now


def make(folder: Path, clock: Clock, **changes: Any) -> Trainer:
    section = tiny_section(epochs=100.0, **changes)
    return Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, section, folder, clock=clock
    )


def test_the_trainer_stops_in_time_and_a_resumed_run_goes_on_with_the_time_left(
    tmp_path: Path,
) -> None:
    # Three looks a step: each takes three seconds.
    whole = make(tmp_path, Clock(1.0), max_seconds=120.0, checkpoint_every=1)
    steps = whole.run()["steps"]
    assert 120 * (1 - 2 * RESERVE) <= steps[-1]["seconds"] <= 120
    assert len(steps) == whole.state.total < whole.full
    assert steps[-1]["learning_rate"] < 0.02 * whole.section.learning_rate
    folder = tmp_path / "cut"
    folder.mkdir()

    def cut(step: int, total: int, row: dict[str, Any]) -> None:
        if step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(folder, Clock(1.0), max_seconds=120.0, checkpoint_every=1).run(cut)
    assert (folder / FILE).exists()
    resumed = make(folder, Clock(2.0), max_seconds=120.0, checkpoint_every=1)
    steps = resumed.run()["steps"]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert 15 + 8 < len(steps) < 15 + 20, "the second half ran at half the speed"
    assert 120 * (1 - 3 * RESERVE) <= steps[-1]["seconds"] <= 120 * 1.1
    assert steps[-1]["learning_rate"] < 0.02 * resumed.section.learning_rate
    rates = [row["learning_rate"] for row in steps[6:]]
    assert all(b < a for a, b in pairwise(rates))


def test_without_a_limit_two_clocks_train_the_same_draft(tmp_path: Path) -> None:
    histories = []
    for number, each in enumerate((1e-3, 50.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer = Trainer(
            tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, tiny_section(epochs=4.0),
            folder, clock=Clock(each),
        )  # fmt: skip
        rows = trainer.run()["steps"]
        histories.append([{k: v for k, v in row.items() if k != "seconds"} for row in rows])
    assert histories[0] == histories[1]
