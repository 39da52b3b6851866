"""What one answer was: its text, its times, and what drafting did for it.

Counts may be missing: servers tell different things, and "not told" is never written as zero.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Protocol

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from dspark.bench.tasks.task import Thinking
from dspark.config.architecture import Frozen

Where = Literal["engine", "dspark", "vllm-request", "vllm-counters", "atom-counters", "none"]
"""Where acceptance was read: in this process, our server's own field, vLLM's per-request field, or
differences of a server's counters."""


class Accepted(Frozen):
    """Counts of drafting, of one answer or of many.

    ``accepted_at[k]`` steps that accepted slot k (0-based); ``admitted_at`` likewise. ``per_step``
    are accepted tokens of every step in order. None: the source does not tell.
    """

    steps: NonNegativeInt
    drafted: NonNegativeInt
    admitted: NonNegativeInt | None = None
    accepted: NonNegativeInt
    accepted_at: tuple[NonNegativeInt, ...] | None = None
    admitted_at: tuple[NonNegativeInt, ...] | None = None
    per_step: tuple[NonNegativeInt, ...] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Accepted:
        if self.accepted > self.drafted or (self.steps == 0 and self.drafted > 0):
            raise ValueError(
                f"accepted {self.accepted} of drafted {self.drafted} in {self.steps} steps"
            )
        if self.admitted is not None and not self.accepted <= self.admitted <= self.drafted:
            raise ValueError(f"admitted {self.admitted} is not between accepted and drafted")
        for name in ("accepted_at", "per_step"):
            counts = getattr(self, name)
            if counts is not None and sum(counts) != self.accepted:
                raise ValueError(f"{name} sums to {sum(counts)}, accepted is {self.accepted}")
        if self.per_step is not None and len(self.per_step) != self.steps:
            raise ValueError(f"{len(self.per_step)} entries of per_step, {self.steps} steps")
        return self


class Ask(Frozen):
    """One request: the conversation so far and how to answer."""

    messages: tuple[dict[str, str], ...]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: PositiveInt
    seed: NonNegativeInt
    thinking: Thinking = "default"


class Answer(Frozen):
    """One reply. ``tokens`` and ``prompt_tokens`` as counted by the engine; seconds from sending.

    ``first`` is the time to the first piece, None when nothing came. ``source`` says where
    ``accepted`` is from.
    """

    text: str
    reasoning: str = ""
    ids: tuple[int, ...] | None = None
    tokens: NonNegativeInt | None
    prompt_tokens: NonNegativeInt | None
    finish: str | None
    first: NonNegativeFloat | None
    seconds: NonNegativeFloat
    accepted: Accepted | None = None
    source: Where = "none"

    @property
    def digest(self) -> str:
        """sha256 of the ids, or of the text where no ids were sent."""
        whole = list(self.ids) if self.ids is not None else [self.reasoning, self.text]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


class Turn(Frozen):
    """One turn of one question at one temperature; ``error`` says why there is no answer."""

    task: str
    question: str
    key: str
    category: str
    turn: NonNegativeInt
    temperature: float
    answer: Answer | None
    error: str | None = None
    timed_out: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Turn:
        if (self.answer is None) == (self.error is None):
            raise ValueError("a turn has an answer or an error")
        return self


class Counters(Frozen):
    """A server's own totals at one moment. ``requests`` and ``tokens`` are of finished answers;
    ``running`` are requests in flight. None: the server does not tell."""

    source: Where
    accepted: Accepted
    requests: NonNegativeInt | None = None
    tokens: NonNegativeInt | None = None
    running: NonNegativeInt | None = None


class Player(Protocol):
    """Something that answers: a server, or an engine in this process."""

    async def answer(self, ask: Ask) -> Answer:
        """Raises DSparkError where there is no answer."""

    async def counters(self) -> Counters | None:
        """Totals of the whole server; None where it has none."""

    @property
    def gone(self) -> str | None:
        """Why no further request can be answered; None while it lives."""

    @property
    def notices(self) -> list[str]:
        """What a reader of its figures must know."""
