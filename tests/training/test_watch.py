"""Ledger and logs survive kills; a trainer that stands still ends with a name and a status."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark.errors import MissingDependencyError
from dspark.training.watch import STALLED, MetricLog, StepLines, Watchdog

HANGS = """
import time
from dspark.training.watch import Watchdog
watch = Watchdog(0.6)
for _ in range(4):
    time.sleep(0.3)
    watch.beat()
with watch.waiting():
    time.sleep(1.2)
print("alive", flush=True)
def stuck_in_a_collective():
    time.sleep(60)
stuck_in_a_collective()
"""


def test_a_trainer_that_stands_still_is_named_and_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.stdout == "alive\n"  # neither beats nor waiting for data count as standing still
    assert done.returncode == STALLED
    assert "stage: trainer" in done.stderr
    assert "stuck_in_a_collective" in done.stderr


def test_a_watch_that_was_ended_ends_nothing() -> None:
    watch = Watchdog(0.1)
    watch.end()
    time.sleep(0.3)


def test_lines_behind_the_checkpoint_and_torn_ones_are_cut(tmp_path: Path) -> None:
    lines = StepLines(tmp_path / "x.jsonl")
    lines.resume(3)  # nothing there yet
    for step in range(1, 6):
        lines.write({"step": step, "rows": [str(step)]})
    with lines.path.open("a") as file:
        file.write('{"step": 2, "rows')
    lines.resume(3)
    lines.write({"step": 4, "rows": ["again"]})
    assert lines.path.read_text().splitlines()[-2:] == [
        '{"step": 3, "rows": ["3"]}',
        '{"step": 4, "rows": ["again"]}',
    ]
    assert len(lines.path.read_text().splitlines()) == 4


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_named_before_training(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingDependencyError) as caught:
        MetricLog((name,), tmp_path)
    assert name in caught.value.fix
    assert MetricLog((), tmp_path).sinks == []
