"""What a decoding request is and what comes back: the words stages share with engines.

Stages that need an engine (regenerate, bench) never import one. They take an object with the
methods of :class:`AnswerEngine` or :class:`LocalDecoder`, which the command line hands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams

FinishReason = Literal["stop", "length"]
TokenKind = Literal["accepted", "bonus", "corrected"]


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt ids and how to answer them."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """Generated ids, the end-of-turn token included when ``finish_reason`` is ``stop``."""

    id: str
    ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass
class Generation:
    """One speculative answer.

    ``ids`` without anything behind the end-of-turn token; ``kinds`` says of each id whether it was
    drafted and accepted, the bonus of a fully accepted block (or of prefill), or the correction
    after a rejection. ``counter`` is None when nothing was drafted.
    """

    ids: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    stopped: bool = False
    counter: AcceptanceCounter | None = None


class AnswerEngine(Protocol):
    """Answers many requests in whatever order and batching it likes."""

    def run(
        self,
        requests: Sequence[GenerationRequest],
        on_result: Callable[[GenerationResult], None],
        on_tokens: Callable[[int], None],
    ) -> None: ...


class LocalDecoder(Protocol):
    """Decodes one request in this process."""

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> Generation: ...
