"""A teacher in a process of its own: ``python made_teacher.py ENDPOINT NAME BEHAVIOUR``.

Its states are made up from the row, so that a reader can tell whether they are the row's own; the
link, the codec and the transports are the real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Group, Row, Teaching
from dspark.hidden.writer import TeacherLink

HIDDEN = 16
TEACHING = Teaching((1, 4, 7), "residual", "post", HIDDEN, 50, "target-hash")


def row(number: int) -> Row:
    """Row ``number``: 6 prompt tokens and an answer of 5 to 14."""
    g = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 50, (11 + number % 10,), generator=g).tolist()
    return Row(f"row-{number:03d}", "made", 0.0, tuple(ids), 6)


def groups(count: int, size: int = 2, bound: int = 10_000) -> Iterator[Group]:
    for number in range(count):
        rows = tuple(row(size * number + i) for i in range(size))
        yield Group(number, rows, bound)


def states_of(row: Row) -> HiddenRecord:
    """The record of a row: a function of its ids."""
    ids = torch.tensor(row.ids, dtype=torch.int32)
    g = torch.Generator().manual_seed(int(ids.sum()))
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    mask[row.prompt_length :] = 1
    final = torch.randn(len(ids), HIDDEN, generator=g).bfloat16()
    # As it arrives: final states only where the next token is supervised.
    final[: row.prompt_length - 1] = 0
    final[-1] = 0
    return HiddenRecord(
        id=row.id,
        category=row.category,
        temperature=row.temperature,
        layer_ids=TEACHING.layer_ids,
        norm_state="post",
        ids=ids,
        loss_mask=mask,
        taps=torch.randn(len(ids), 3, HIDDEN, generator=g).bfloat16(),
        final=final,
        greedy=ids,
        log_z=torch.randn(len(ids), generator=g),
        engine="made",
    )


class Process:
    """One such process, killed when a test ends."""

    def __init__(self, endpoint: str, name: str = "one", behaviour: str = "sound") -> None:
        self.popen = subprocess.Popen(
            [sys.executable, __file__, endpoint, name, behaviour],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate()


def serve(link: TeacherLink, behaviour: str) -> None:
    sent = 0
    while (work := link.next()) is not None:
        for index, wanted in enumerate(work.rows):
            if behaviour == "asleep":
                time.sleep(60)
            if behaviour == "dies" and sent == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "slow":
                time.sleep(0.05)
            if behaviour == "refuses":
                link.refuse(work, "no such layer")
                break
            if behaviour == "loses":
                # Counted as sent, but the network swallowed it.
                link._trainers[work.rank].sent += 1
                continue
            link.put(work, index, states_of(wanted))
            sent += 1


def main(endpoint: str, name: str, behaviour: str) -> None:
    teaching = TEACHING
    if behaviour == "shifted":
        teaching = Teaching((2, 5, 8), *list(vars(TEACHING).values())[1:])
    endpoints = endpoint.split(",")
    link = TeacherLink(endpoints, teaching, name=name, lost_seconds=30)
    try:
        serve(link, behaviour)
    finally:
        link.close()


def settle(check: object, seconds: float = 20) -> None:
    """Wait until ``check()`` holds."""
    deadline = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def folder_files(folder: Path) -> Sequence[str]:
    return sorted(p.name for p in folder.glob("dspark-*"))


if __name__ == "__main__":
    main(*sys.argv[1:])
