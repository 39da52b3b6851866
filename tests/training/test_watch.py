"""Ledger and logs survive kills; a trainer that stands still ends with a name and a status."""

from __future__ import annotations

import json
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
watch = Watchdog(2.0)
for _ in range(5):
    time.sleep(0.5)
    watch.beat()
with watch.waiting():
    time.sleep(2.5)
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
def test_a_logger_that_is_not_installed_is_named_before_training(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails from here on
    with pytest.raises(MissingDependencyError) as caught:
        MetricLog((name,), tmp_path)
    assert name in caught.value.fix
    assert MetricLog((), tmp_path).sinks == []


ROWS = [{"step": n, "loss": 3.0 - 0.1 * n, "by": {"slot": n / 10}} for n in range(1, 6)]


def test_tensorboard_s_files_hold_every_step_once_also_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricLog(("tensorboard",), tmp_path)
    log.resume(0)
    for row in ROWS:
        log.write(row)
    again = MetricLog(("tensorboard",), tmp_path)  # killed; the last checkpoint is that of step 3
    again.resume(3)
    for row in ROWS[3:]:
        again.write({**row, "loss": row["loss"] + 1})  # type: ignore[operator]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["by/slot", "loss"]
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    assert [value for _, value in losses] == pytest.approx([2.9, 2.8, 2.7, 3.6, 3.5])


LOGS = """
import json, sys
from pathlib import Path
from dspark.training.watch import MetricLog
log = MetricLog(("wandb",), Path(sys.argv[1]))
log.resume(0)
for row in json.loads(sys.argv[2]):
    log.write(row)
"""


def test_wandb_offline_keeps_the_figures_of_every_step(tmp_path: Path) -> None:
    """A process of its own, as a run is: W&B writes the last of them when it ends."""
    pytest.importorskip("wandb")
    path = os.pathsep.join(p for p in sys.path if p)
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", LOGS, str(tmp_path), json.dumps(ROWS)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **quiet},
    )
    assert done.returncode == 0, done.stderr
    (body,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # Records are protocol buffers, whose strings lie there as they are.
    raw = body.read_bytes()
    for row in ROWS:
        assert json.dumps(row["loss"]).encode() in raw, row
