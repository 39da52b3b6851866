"""Finished rows, prompts and answers: JSON Lines shards named by their content.

``shards/train-00000-<sha256>.jsonl`` and so on, at most :data:`SHARD_ROWS` rows each. The name
tells two shards of different content apart without opening them, and a shard that is there already
is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from dspark.artifacts import atomic_write, storage_guard
from dspark.data.jsonl import read_json_lines
from dspark.data.prompt import Prompt, Split, first_problem
from dspark.errors import DataError

SHARDS = "shards"
SHARD_ROWS = 20_000
SHARD_BYTES = 64_000_000


class ShardWriter:
    """Collects rows under the name of their part and writes a shard whenever one is full."""

    def __init__(self, folder: Path, parts: Sequence[str] = ("train", "held_out")) -> None:
        self._folder = folder / SHARDS
        with storage_guard(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._lines: dict[str, list[str]] = {part: [] for part in parts}
        self._bytes: dict[str, int] = dict.fromkeys(parts, 0)
        self._written: dict[str, int] = dict.fromkeys(parts, 0)
        self._names: set[str] = set()

    def add(self, split: str, line: str) -> None:
        """Append one row (JSON without a line end)."""
        self._lines[split].append(line)
        self._bytes[split] += len(line)
        if len(self._lines[split]) >= SHARD_ROWS or self._bytes[split] >= SHARD_BYTES:
            self._flush(split)

    def close(self) -> None:
        """Write what is left and remove shards of an earlier attempt that are no part of this."""
        for part in self._lines:
            self._flush(part)
        with storage_guard(self._folder):
            for path in self._folder.iterdir():
                if path.name not in self._names:
                    path.unlink()

    def _flush(self, split: str) -> None:
        if not self._lines[split]:
            return
        content = "".join(line + "\n" for line in self._lines[split]).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        name = f"{split}-{self._written[split]:05d}-{digest}.jsonl"
        if not (self._folder / name).exists():
            atomic_write(self._folder / name, content)
        self._names.add(name)
        self._lines[split], self._bytes[split] = [], 0
        self._written[split] += 1


def stream_prompts(folder: Path, split: Split) -> Iterator[Prompt]:
    """Prompts of one split of a finished prompts folder, shard by shard.

    Raises:
        DataError: a shard is unreadable or a line is no prompt.
    """
    for path in sorted((folder / SHARDS).glob(f"{split}-*.jsonl")):
        for number, row in read_json_lines(path):
            try:
                yield Prompt.model_validate(row)
            except ValidationError as error:
                raise DataError(
                    expected="a prompt (id, split, category, messages, later_turns)",
                    found=first_problem(error),
                    where=f"{path}, line {number}",
                    fix="Run the prompts stage again; this file is its output, not its input.",
                ) from error


def read_prompts(folder: Path, split: Split) -> list[Prompt]:
    """All prompts of one split.

    Raises:
        DataError: there is none, an id occurs twice, or as :func:`stream_prompts`.
    """
    prompts = list(stream_prompts(folder, split))
    if not prompts:
        raise DataError(
            expected=f"at least one {split} prompt",
            found="none",
            where=str(folder / SHARDS),
            fix=f"Ask for {split} prompts in the recipe and run the prompts stage again.",
        )
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise DataError(
            expected="ids that name one prompt each",
            found="an id twice",
            where=str(folder / SHARDS),
            fix="Run the prompts stage again.",
        )
    return prompts
