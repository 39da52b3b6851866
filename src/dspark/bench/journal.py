"""Finished decodings of a bench, kept line by line, so that a killed bench goes on where it was.

One line is one prompt through both arms, at one temperature, in one repeat. What is read back as a
figure of its own must not depend on the kill: decoding is seeded, so ids and counts of a prompt are
those it would have had. Seconds are another matter. Repeats of one prompt group are timed plain and
draft in turn, within one process; when a group's timing was cut, its timed lines are dropped and
the group is timed again as a whole. Lines of another machine are dropped too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_write, storage_guard
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.request import Generation

UNFINISHED = "unfinished.jsonl"


@dataclass(frozen=True)
class Key:
    """Which decoding: ``repeat`` counts from 0, the pass that every prompt is part of."""

    prompt: str
    temperature: float
    repeat: int


@dataclass(frozen=True)
class Pair:
    """One prompt through both arms, and the seconds of each."""

    plain: Generation
    draft: Generation
    plain_seconds: float
    draft_seconds: float


class Journal:
    """Pairs by key; with a ``path`` they outlive the process. ``head``, the machine and whatever
    else must be the same for them to be worth anything, is the first line of the file.

    ``from_elsewhere``: the file held decodings under another head, which are not used.
    """

    def __init__(self, path: Path | None = None, head: dict[str, Any] | None = None) -> None:
        self.path = path
        self.from_elsewhere = False
        self._head = head or {}
        self._pairs = {} if path is None else self._read(path)

    @property
    def found(self) -> int:
        """How many decodings are there now."""
        return len(self._pairs)

    def get(self, key: Key) -> Pair | None:
        """What an earlier process measured, or None."""
        return self._pairs.get(key)

    def keep_whole(self, groups: Iterable[set[Key]]) -> None:
        """Drop the lines of every timing group that is not there as a whole.

        Raises:
            StorageError: the file cannot be written.
        """
        for group in groups:
            if not group <= self._pairs.keys():
                for key in group:
                    self._pairs.pop(key, None)
        if self.path is not None:
            # Rewritten whole, so that appending never continues a torn line.
            rows = [self._head, *(_row(key, pair) for key, pair in self._pairs.items())]
            atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def add(self, key: Key, pair: Pair) -> None:
        """Keep a pair as soon as it is measured.

        Raises:
            StorageError: the disk is full.
        """
        self._pairs[key] = pair
        if self.path is not None:
            with storage_guard(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_row(key, pair)) + "\n")

    def _read(self, path: Path) -> dict[Key, Pair]:
        """Whole lines of this machine; a torn last line is simply measured again."""
        if not path.exists():
            return {}
        with storage_guard(path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        pairs: dict[Key, Pair] = {}
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                if number == 0 and row != self._head:
                    self.from_elsewhere = True
                    return {}
                if number:
                    pairs[Key(**row["key"])] = _pair(row)
            except (ValueError, TypeError, LookupError):
                continue
        return pairs


def _row(key: Key, pair: Pair) -> dict[str, Any]:
    return {"key": asdict(key), **asdict(pair)}


def _pair(row: dict[str, Any]) -> Pair:
    arms = {}
    for arm in ("plain", "draft"):
        counter = row[arm].pop("counter")
        arms[arm] = Generation(
            **row[arm], counter=None if counter is None else AcceptanceCounter(**counter)
        )
    return Pair(arms["plain"], arms["draft"], row["plain_seconds"], row["draft_seconds"])
