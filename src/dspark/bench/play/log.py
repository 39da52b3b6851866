"""Answers of a suite, kept line by line: what a killed run goes on from, and what others compare.

The first line says what was asked of whom (a fingerprint of settings, tasks and stack). A run with
another fingerprint does not go on from it but is refused, so that two stacks never share a file.
Failures are kept for the record but asked again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dspark.artifacts import atomic_write, storage_guard
from dspark.bench.play.turn import Turn
from dspark.errors import DamagedArtifactError, ForeignArtifactError, MissingArtifactError

Key = tuple[str, float, int]


class AnswerLog:
    """Turns by (question, temperature, turn); with a ``path`` they outlive the process.

    Raises:
        ForeignArtifactError: the file is of another run.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self.path, self.head = path, json.loads(json.dumps(head))
        self.turns: dict[Key, Turn] = {}
        if path is not None and path.exists():
            found, turns = read_answers(path)
            if found != self.head:
                different = sorted(
                    k for k in {*found, *self.head} if found.get(k) != self.head.get(k)
                )
                raise ForeignArtifactError(
                    expected="answers of this very run",
                    found=f"another {', '.join(different)}",
                    where=str(path),
                    fix="Name another --out, or remove the file.",
                )
            self.turns = {_key(t): t for t in turns if t.answer is not None}
        self.resumed = len(self.turns)
        if path is not None:
            # Rewritten whole, so that appending never continues a torn line.
            lines = [json.dumps(self.head), *(t.model_dump_json() for t in self.turns.values())]
            atomic_write(path, "".join(line + "\n" for line in lines))

    def get(self, question: str, temperature: float, turn: int) -> Turn | None:
        """What an earlier process was answered."""
        return self.turns.get((question, temperature, turn))

    def add(self, turn: Turn) -> None:
        """Keep a turn as soon as it is there.

        Raises:
            StorageError: the disk is full.
        """
        self.turns[_key(turn)] = turn
        if self.path is not None:
            with storage_guard(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(turn.model_dump_json() + "\n")


def read_answers(path: Path) -> tuple[dict[str, Any], list[Turn]]:
    """Head and turns of a file; a torn last line is left out.

    Raises:
        MissingArtifactError, DamagedArtifactError: no such file, or no answers of a suite.
    """
    try:
        with storage_guard(path):
            lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise MissingArtifactError(
            expected="answers of a suite",
            found="no file",
            where=str(path),
            fix="Keep the .answers.jsonl beside its results.",
        ) from None
    turns = []
    try:
        head = json.loads(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            if not line:
                continue
            try:
                turns.append(Turn.model_validate_json(line))
            except ValidationError:
                if number < len(lines):
                    raise
    except ValueError as error:
        raise DamagedArtifactError(
            expected="one JSON line a turn",
            found=" ".join(str(error).split())[:200],
            where=str(path),
            fix="Remove the file and measure again.",
        ) from error
    return head, turns


def _key(turn: Turn) -> Key:
    return turn.question, turn.temperature, turn.turn
