"""Sieved chunks on disk while the stage is unfinished, so that a killed stage goes on where it was.

A chunk is five files: its rows as JSON Lines, arrays of their keys and signatures, and the account,
which is written last and marks the chunk as done. Each appears whole or not at all. The folder is
removed when the shards are complete; renaming it first keeps a half-removed one from being taken
for work to resume.
"""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.artifacts import atomic_write, storage_guard
from dspark.data.filters.minhash import ENTRIES, Signatures
from dspark.data.sieve import Drop, Sieved

CHUNK_ROWS = 4096
_WORK = f"work-1-{CHUNK_ROWS}"
_REMOVED = "work-removed"


class Account:
    """The tallies of all chunks together."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.drops: Counter[tuple[int, str, str]] = Counter()
        self.examples: dict[tuple[int, str, str], str] = {}
        self.hits: list[dict[str, str]] = []
        self.held_out_questions: list[int] = []
        self.scrubbed: Counter[str] = Counter()

    def add(self, tally: dict[str, Any]) -> None:
        """Add what :meth:`Chunks.put` wrote, chunks in order."""
        self.made.update(tally["made"])
        for source, split, step, count, example in tally["drops"]:
            self.drop((source, split, step), count, example)
        self.hits += tally["hits"]
        self.held_out_questions += tally["held_out_questions"]
        self.scrubbed.update(tally["scrubbed"])

    def drop(self, what: tuple[int, str, str], count: int, example: str) -> None:
        """Count dropped rows of (source, split, step); the first example is kept."""
        self.drops[what] += count
        self.examples.setdefault(what, example)


class Chunks:
    """The chunks of one unfinished stage folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _WORK
        with storage_guard(folder):
            shutil.rmtree(folder / _REMOVED, ignore_errors=True)
            self._folder.mkdir(exist_ok=True)

    def done(self, number: int) -> bool:
        """Whether chunk ``number`` was finished, perhaps by a process that is gone."""
        return self._path(number, "json").exists()

    def put(self, number: int, sieved: Sieved) -> None:
        """Write a chunk; its account comes last."""
        atomic_write(self._path(number, "jsonl"), "".join(line + "\n" for line in sieved.lines))
        atomic_write(self._path(number, "rows"), _bytes(sieved.rows))
        atomic_write(self._path(number, "signatures"), sieved.signatures.tobytes())
        beginnings = np.array(sieved.beginnings, dtype=np.uint64).reshape(-1, 2)
        atomic_write(self._path(number, "beginnings"), _bytes(beginnings))
        counted: Counter[tuple[int, str, str]] = Counter()
        examples: dict[tuple[int, str, str], str] = {}
        for drop in sieved.drops:
            counted[drop[:3]] += 1
            examples.setdefault(drop[:3], drop.example)
        tally = {
            "rows": len(sieved.rows),
            "made": sieved.made,
            "drops": [[*what, count, examples[what]] for what, count in counted.items()],
            "hits": sieved.hits,
            "held_out_questions": sieved.held_out_questions,
            "scrubbed": sieved.scrubbed,
        }
        atomic_write(self._path(number, "json"), json.dumps(tally))

    def account(self, count: int) -> Account:
        """The tallies of the first ``count`` chunks."""
        account = Account()
        for number in range(count):
            account.add(json.loads(self._path(number, "json").read_bytes()))
        return account

    def rows(self, count: int) -> npt.NDArray[Any]:
        """What is remembered of each row that passed, all chunks in order."""
        parts = [np.load(self._path(number, "rows"), allow_pickle=False) for number in range(count)]
        return np.concatenate(parts)

    def beginnings(self, count: int) -> npt.NDArray[np.uint64]:
        """(row, key) of the shorter conversations that rows begin with, [n, 2]."""
        parts = [np.zeros((0, 2), np.uint64)]
        first = 0
        for number in range(count):
            part = np.load(self._path(number, "beginnings"), allow_pickle=False)
            part[:, 0] += np.uint64(first)
            parts.append(part)
            first += int(json.loads(self._path(number, "json").read_bytes())["rows"])
        return np.concatenate(parts)

    def signatures(self, count: int, rows: int) -> Signatures:
        """Signatures of all rows as one memory map, [rows, ENTRIES]."""
        path = self._folder / "signatures"
        with storage_guard(path), path.open("wb") as whole:
            for number in range(count):
                with self._path(number, "signatures").open("rb") as part:
                    shutil.copyfileobj(part, whole)
        if not rows:
            return np.zeros((0, ENTRIES), np.uint16)
        return np.memmap(path, dtype=np.uint16, mode="r", shape=(rows, ENTRIES))

    def lines(self, count: int) -> Iterator[str]:
        """The rows that passed as JSON, without line ends, in the order of :meth:`rows`."""
        for number in range(count):
            with self._path(number, "jsonl").open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line.rstrip("\n")

    def remove(self) -> None:
        """Forget all chunks."""
        removed = self._folder.with_name(_REMOVED)
        with storage_guard(self._folder):
            self._folder.rename(removed)
            shutil.rmtree(removed)

    def _path(self, number: int, ending: str) -> Path:
        return self._folder / f"{number:06d}.{ending}"


def _bytes(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


__all__ = ["CHUNK_ROWS", "Account", "Chunks", "Drop"]
