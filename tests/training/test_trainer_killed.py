"""``kill -9`` in the middle of training: the resumed run equals the uninterrupted one, bit for bit.

Resumed runs of public trainers skipped rows, lost the shuffle order or restored the wrong learning
rate, and nobody saw it in the loss. Here real processes die, one between two checkpoints and one
as its checkpoint has just been written, and another process finishes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import killed_run
import torch
from tiny_models import one_thread  # noqa: F401 (autouse)

from dspark.training.checkpoint import FILE


def killed_at(folder: Path, step: int, seed: int) -> list[int]:
    """Steps a process reported before it was killed while standing behind ``step``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, killed_run.__file__, str(folder), str(step), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    seen: list[int] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(int(line))
        if seen[-1] == step:
            break
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    return seen


def test_a_run_killed_twice_equals_one_that_was_not(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    folder.mkdir()
    want = killed_run.run(straight, seed=0)
    total = len(want["history"]["steps"])
    assert total > 12
    # Behind step 8: the file is that of step 6, and steps 7 and 8 are lost.
    assert killed_at(folder, 8, seed=1) == list(range(1, 9))
    # Behind step 9, whose file is on the disk: only from there on is anything done again.
    assert killed_at(folder, 9, seed=2) == [7, 8, 9]
    resumed: list[int] = []
    got = killed_run.run(folder, 3, resumed.append)
    assert resumed == list(range(10, total + 1))
    assert got["history"] == want["history"]
    assert got["weights"] == want["weights"]


def test_without_the_resume_file_the_comparison_would_fail(tmp_path: Path) -> None:
    """Starting over from half-trained weights is another run: the hash above means something."""
    first = killed_run.run(tmp_path, seed=0)
    state = torch.load(tmp_path / FILE, weights_only=True)
    state["state"]["step"] -= 3
    torch.save(state, tmp_path / FILE)
    assert killed_run.run(tmp_path, seed=0)["weights"] != first["weights"]
