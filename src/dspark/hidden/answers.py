"""Answers the target wrote itself, as token ids: what regenerate writes and capture replays.

Ids are stored, never only text: the training ids are exactly the ids the engine read and produced,
so no template or tokenizer can move the loss mask. The messages are kept beside them for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from dspark.artifacts import atomic_write
from dspark.errors import DataError

TokenId = Annotated[int, Field(ge=0)]
Finish = Literal["stop", "length", "tool_calls"]
SHARDS = "shards"
SHARD_NAME = "answers"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(_Row):
    """How the tokens of a row were drawn; ``seed`` is that of its last turn."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int


class Counts(_Row):
    """Tokens before the first generated one, generated ones, those of them that are reasoning (as
    the server counts, null where it does not), and turns that the target answered."""

    prompt: NonNegativeInt
    generated: NonNegativeInt
    reasoning: NonNegativeInt | None = None
    turns: int = Field(default=1, ge=1)


class Generation(_Row):
    """Who wrote the answer, and how. ``server`` is a url, or ``embedded`` for our own engine."""

    model: str
    revision: str | None
    server: str
    sampling: Sampling
    effort: str | None
    finish_reason: Finish
    counts: Counts


class Answer(_Row):
    """One sequence to train on: what the target saw, and what it wrote.

    ``loss_mask`` is 1 on generated tokens, the end-of-turn token included, and 0 on everything
    else; left out, it is 1 from ``prompt_length`` on. A conversation is one row as long as each
    turn was asked with the very ids before it; where the template rewrites the past (it drops old
    reasoning), the turn begins a row of its own. ``prompt`` is the id of the prompt it belongs to;
    ``finish_reason`` that of the last turn.
    """

    id: str
    category: str
    temperature: float
    prompt_length: int = Field(gt=0)
    finish_reason: Finish
    ids: tuple[TokenId, ...]
    loss_mask: tuple[Literal[0, 1], ...]
    prompt: str = ""
    source: str = ""
    language: str = "und"
    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    generation: Generation | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_answer(cls, raw: Any) -> Any:
        """Without a mask, everything behind the prompt is one answer."""
        if isinstance(raw, dict) and "loss_mask" not in raw:
            length, ids = raw.get("prompt_length"), raw.get("ids")
            if isinstance(length, int) and isinstance(ids, (list, tuple)):
                mask = [0] * min(length, len(ids)) + [1] * (len(ids) - length)
                raw = {**raw, "loss_mask": mask}
        return raw

    @model_validator(mode="after")
    def _has_an_answer(self) -> Answer:
        if len(self.loss_mask) != len(self.ids):
            raise ValueError(f"loss_mask of {len(self.loss_mask)} for {len(self.ids)} ids")
        if 1 not in self.loss_mask:
            raise ValueError("no generated token after the prompt")
        if self.loss_mask.index(1) != self.prompt_length:
            raise ValueError("loss_mask does not begin at prompt_length")
        return self

    @property
    def trained(self) -> int:
        """Tokens that are trained on."""
        return sum(self.loss_mask)


def write_answers(path: Path, answers: Iterable[Answer]) -> int:
    """Write JSON Lines atomically; return how many."""
    lines = [a.model_dump_json() for a in answers]
    atomic_write(path, "".join(line + "\n" for line in lines))
    return len(lines)


def answer_files(folder: Path) -> list[Path]:
    """The shards of a finished answers folder, in order."""
    return sorted((folder / SHARDS).glob(f"{SHARD_NAME}-*.jsonl"))


def stream_answers(path: Path) -> Iterator[Answer]:
    """The answers of one file, or of all shards of a finished answers folder, one at a time.

    Raises:
        DataError: unreadable, empty or malformed; names the line.
    """
    number, where, found = 0, path, False
    try:
        for where in answer_files(path) if path.is_dir() else [path]:
            number = 0
            with where.open(encoding="utf-8") as file:
                for line in file:
                    number, found = number + 1, True
                    yield Answer.model_validate(json.loads(line))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
        raise DataError(
            expected="answers as JSON Lines",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=f"{where}:{number}",
            fix="Run the regenerate stage again.",
        ) from error
    if not found:
        raise DataError(
            expected="at least one answer",
            found="an empty file" if path.is_file() else "no shard of answers",
            where=str(path),
            fix="Run the regenerate stage again with training prompts.",
        )


def read_answers(path: Path) -> list[Answer]:
    """All of :func:`stream_answers`."""
    return list(stream_answers(path))
