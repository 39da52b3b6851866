"""Offline, replayed and online: one training run. Killed anywhere, it is still the same one.

Trainers and teachers are processes on a loopback wire; the target is the tiny one.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import streaming_run
import torch
from streaming_run import ROWS, Process
from tiny_models import one_thread  # noqa: F401 (autouse)

from dspark.training.watch import LEDGER
from endpoints import free_endpoint


def place(folder: Path) -> Path:
    folder.mkdir()
    return folder


def ledger(folder: Path, rank: int = 0) -> list[list[str]]:
    """Rows of every step."""
    lines = (folder / f"rank-{rank}.{LEDGER}").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [[name for batch in row["rows"] for name in batch] for row in rows]


def assert_every_row_thrice(*folders_ranks: tuple[Path, int]) -> None:
    """24 rows are trained on (two are held back), in three epochs: none is lost or doubled."""
    counts = Counter(
        name for folder, rank in folders_ranks for step in ledger(folder, rank) for name in step
    )
    assert len(counts) == ROWS - 2
    assert set(counts.values()) == {3}


def test_the_three_modes_give_the_same_losses_on_the_same_rows(tmp_path: Path) -> None:
    offline = streaming_run.train(place(tmp_path / "offline"), "", "offline")
    found = {}
    for mode in ("replay", "online"):
        endpoint, folder = free_endpoint(), place(tmp_path / mode)
        with Process("teach", endpoint, "one"), Process("teach", endpoint, "two"):
            found[mode] = streaming_run.train(folder, endpoint, mode, stream={"transport": "shm"})
        assert_every_row_thrice((folder, 0))
    for mode, result in found.items():
        assert len(result["losses"]) == len(offline["losses"]) == 18, mode
        # Forwards of other shapes round otherwise; nothing else may differ.
        torch.testing.assert_close(result["losses"], offline["losses"], rtol=1e-4, atol=1e-5)
    # Losses that did not move could not tell rows apart.
    assert max(offline["losses"]) - min(offline["losses"]) > 0.1


def test_whatever_is_killed_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with Process("teach", endpoint, "one"):
        straight = streaming_run.train(place(tmp_path / "straight"), endpoint, "online")
    folder, endpoint = place(tmp_path / "killed"), free_endpoint()
    teachers = [Process("teach", endpoint, "a"), Process("teach", endpoint, "b")]
    try:
        # Step 5: the file is that of step 4, and rows of step 6 and later are in flight.
        with Process("train", str(folder), endpoint, "online", "stop_at=5") as trainer:
            trainer.reaches(5)
            teachers[0].kill()
        with Process("train", str(folder), endpoint, "online", "stop_at=9") as trainer:
            trainer.reaches(9)
        teachers.append(Process("teach", endpoint, "c"))
        with Process("train", str(folder), endpoint, "online") as trainer:
            resumed = trainer.result(folder)
    finally:
        for teacher in teachers:
            teacher.kill()
    assert resumed == straight
    assert_every_row_thrice((folder, 0))


@pytest.mark.slow
def test_fifty_random_kills_of_trainer_teachers_and_wire_change_nothing(tmp_path: Path) -> None:
    """Whoever is killed is started again after a random time; the trainer says when it is over."""
    endpoint = free_endpoint()
    epochs = "epochs=450.0"
    with Process("teach", endpoint, "one"):
        straight = streaming_run.train(place(tmp_path / "s"), endpoint, "replay", epochs=450.0)
    folder, inner, outer = place(tmp_path / "killed"), free_endpoint(), free_endpoint()
    programs = {
        "trainer": ("train", str(folder), inner, "replay", epochs),
        "near": ("teach", inner, "near"),
        "far": ("teach", outer, "far"),
        "wire": ("wire", outer, inner),
    }
    rng, kills = random.Random(0), Counter[str]()
    alive = {name: Process(*arguments) for name, arguments in programs.items()}
    try:
        while sum(kills.values()) < 50 and alive["trainer"].popen.poll() is None:
            time.sleep(rng.uniform(0.2, 4.0))
            name = rng.choice(["trainer", "near", "far", "wire"])
            if name == "trainer" and alive[name].popen.poll() is not None:
                break
            alive[name].kill()
            kills[name] += 1
            alive[name] = Process(*programs[name])
        resumed = alive["trainer"].result(folder)
    finally:
        for process in alive.values():
            process.kill()
    assert sum(kills.values()) == 50, kills
    assert resumed == straight
    counts = Counter(name for step in ledger(folder) for name in step)
    assert set(counts.values()) == {450}


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)],
)
def test_a_signal_saves_the_step_that_is_done(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Step 3 is not due for a checkpoint: only the signal writes it."""
    want = streaming_run.train(place(tmp_path / "straight"), "", "offline")
    folder = place(tmp_path / "cut")
    with Process("train", str(folder), "", "offline", "stop_at=3", "checkpoint_every=100") as cut:
        cut.reaches(3)
        cut.popen.send_signal(number)
        _, errors = cut.popen.communicate(timeout=60)
        assert cut.popen.returncode in (status, -number), errors
    seen: list[int] = []
    with Process("train", str(folder), "", "offline", "checkpoint_every=100") as rest:
        assert rest.popen.stdout is not None
        seen = [int(line) for line in rest.popen.stdout]
        assert rest.result(folder) == want
    assert seen[0] == 4
