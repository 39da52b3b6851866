"""Answers the target wrote itself, as token ids: what regenerate writes and capture replays.

Ids are stored, never text: the training ids are exactly the ids the engine produced, so no
template or tokenizer can move the loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark.artifacts import atomic_write
from dspark.errors import DataError

TokenId = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """One on-policy answer. The loss mask is 1 on ``ids[prompt_length:]`` and 0 before."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    category: str
    temperature: float
    prompt_length: int = Field(gt=0)
    finish_reason: Literal["stop", "length"]
    ids: tuple[TokenId, ...]

    @model_validator(mode="after")
    def _has_an_answer(self) -> Answer:
        if len(self.ids) <= self.prompt_length:
            raise ValueError("no generated token after the prompt")
        return self


def write_answers(path: Path, answers: Iterable[Answer]) -> int:
    """Write JSON Lines atomically; return how many."""
    lines = [a.model_dump_json() for a in answers]
    atomic_write(path, "".join(line + "\n" for line in lines))
    return len(lines)


def read_answers(path: Path) -> list[Answer]:
    """Read all answers.

    Raises:
        DataError: unreadable, empty or malformed; names the line.
    """
    answers = []
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                answers.append(Answer.model_validate(json.loads(line)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
        raise DataError(
            expected="answers as JSON Lines",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=f"{path}:{number}",
            fix="Run the regenerate stage again.",
        ) from error
    if not answers:
        raise DataError(
            expected="at least one answer",
            found="an empty file",
            where=str(path),
            fix="Run the regenerate stage again with training prompts.",
        )
    return answers
