"""Finished conversations on disk while the stage is unfinished.

A record is a header line and the lines of its rows. It is written at once and counts only when it
is whole, so a killed stage answers at most what was under way again. Only ids and places are kept
in memory; rows are copied from here into the shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.artifacts import storage_guard
from dspark.hidden.answers import Answer

UNFINISHED = "unfinished.jsonl"


class Journal:
    """The records of one unfinished stage folder; ``places`` maps a prompt's id to its record."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNFINISHED
        self.places: dict[str, tuple[int, int]] = {}
        with storage_guard(self._path):
            self._path.touch()
            end = self._scan()
            os.truncate(self._path, end)
            self._file = self._path.open("r+b")
            self._end = end

    def _scan(self) -> int:
        """Find whole records; where the last of them ends."""
        end = 0
        with self._path.open("rb") as file:
            while header := file.readline():
                try:
                    found = json.loads(header)
                    name, rows = str(found["prompt"]), int(found["rows"])
                except (ValueError, KeyError, TypeError):
                    break
                lines = [header, *(file.readline() for _ in range(rows))]
                if not all(line.endswith(b"\n") for line in lines):
                    break
                size = sum(map(len, lines))
                self.places[name] = (end, size)
                end += size
        return end

    def add(self, prompt: str, rows: Sequence[Answer], tally: dict[str, int]) -> None:
        """Append a finished conversation. Raises StorageError when the disk is full."""
        facts = [_facts(row) for row in rows]
        header = {"prompt": prompt, "rows": len(rows), "tally": tally, "facts": facts}
        lines = [json.dumps(header), *(row.model_dump_json() for row in rows)]
        record = "".join(line + "\n" for line in lines).encode()
        with storage_guard(self._path):
            self._file.seek(self._end)
            self._file.write(record)
            self._file.flush()
        self.places[prompt] = (self._end, len(record))
        self._end += len(record)

    def read(self, prompt: str) -> tuple[dict[str, Any], list[str]]:
        """The header of a record and its rows as JSON lines without line ends."""
        start, size = self.places[prompt]
        with storage_guard(self._path):
            self._file.seek(start)
            header, *rows = self._file.read(size).decode().splitlines()
        return json.loads(header), rows

    def close(self) -> None:
        """Close the file; it stays where it is."""
        self._file.close()


def _facts(row: Answer) -> dict[str, Any]:
    """What the report tells of a row, so that it is not parsed again."""
    by = row.generation
    return {
        "category": row.category,
        "temperature": row.temperature,
        "tokens": len(row.ids),
        "trained": row.trained,
        "turns": 1 if by is None else by.counts.turns,
        "finish": row.finish_reason,
        "maker": None if by is None else [by.model, by.revision, by.server],
    }
