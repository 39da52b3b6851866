"""How an artifact came to be: which command and code made it, on which machine, in how much time.

A stage may need several tries (Ctrl-C, ``kill -9``, a full disk). Each try is an :class:`Attempt`
in ``stage.json`` while the stage is unfinished, and all of them end up in the manifest's ``made``
block, so that a figure can be traced to the code and the machine that gave it, whenever the report
is written. None of it decides an artifact's content, and none of it is part of its fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, NonNegativeFloat

from dspark.config.architecture import Frozen

Ending = Literal["open", "finished", "interrupted", "killed"]


class Origin(Frozen):
    """What a command runs on. ``commit`` ends in ``+dirty`` when tracked files were changed."""

    command: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, str | int | float]


class Attempt(Origin):
    """One try at a stage.

    ``started`` is ISO 8601 in UTC. ``seconds`` are those of work, sealing included; ``loading`` are
    those spent loading the target, counted apart. ``ended`` is ``open`` while the try runs; a try
    that was killed cannot write its end, so its seconds are those until its last file.
    """

    started: str
    seconds: NonNegativeFloat = 0.0
    loading: NonNegativeFloat = 0.0
    ended: Ending = "open"


class Made(Origin):
    """All attempts at one artifact: first start, summed seconds, and the last attempt's origin."""

    started: str
    seconds: NonNegativeFloat
    loading: NonNegativeFloat
    attempts: tuple[Attempt, ...] = Field(min_length=1)


def made_of(attempts: Sequence[Attempt]) -> Made:
    """The block for the manifest; ``attempts`` in order of time, at least one."""
    last = attempts[-1]
    return Made(
        **last.model_dump(include=set(Origin.model_fields)),
        started=attempts[0].started,
        seconds=round(sum(a.seconds for a in attempts), 2),
        loading=round(sum(a.loading for a in attempts), 2),
        attempts=tuple(attempts),
    )


class Stopwatch:
    """Times one try. ``loading`` gives the seconds this process has spent loading so far."""

    def __init__(self, origin: Origin, loading: Callable[[], float] = lambda: 0.0) -> None:
        self._origin, self._loading = origin, loading
        self._started = datetime.now(UTC).isoformat(timespec="microseconds")
        self._start, self._loaded = time.monotonic(), loading()

    def attempt(self, ended: Ending) -> Attempt:
        """The try as it stands now."""
        loading = self._loading() - self._loaded
        seconds = time.monotonic() - self._start - loading
        return Attempt(
            **self._origin.model_dump(),
            started=self._started,
            seconds=round(max(0.0, seconds), 2),
            loading=round(loading, 2),
            ended=ended,
        )


def killed(attempt: Attempt, last_sign: float) -> Attempt:
    """An attempt left open, closed at ``last_sign`` (a file's mtime, seconds since the epoch)."""
    seconds = last_sign - datetime.fromisoformat(attempt.started).timestamp() - attempt.loading
    return attempt.model_copy(update={"seconds": round(max(0.0, seconds), 2), "ended": "killed"})
