"""One answer while it grows, and what a caller gets of it: pieces, or the whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from dspark.decoding.acceptance import AcceptanceCounter, StepCount
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import TokenKind
from dspark.engine.request import Request, StepResult, TokenLogprob
from dspark.engine.text import TextStream

EndReason = Literal["stop", "length", "abort"]


@dataclass
class Times:
    """When an answer was ``queued``, first ``started`` (its prefill began), had its ``first`` and
    its ``last`` token: seconds of ``time.perf_counter``, None until it happens."""

    queued: float
    started: float | None = None
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to answer ``index`` of request ``id``.

    ``text`` may lag behind ``ids`` (half characters, what might become a stop string). ``kinds``
    and ``starts`` go with ``ids``: how a token came to be, and where in the answer's whole text its
    own text begins (a token of a half character begins where that character does; one behind the
    end of the text was cut off). ``count`` is of the verify step, ``rejected`` what it refused;
    ``at`` is when the step ended, in seconds of ``time.perf_counter``.
    """

    id: str
    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: EndReason | None
    stop_reason: int | str | None
    kinds: tuple[TokenKind, ...] = ()
    starts: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    count: StepCount | None = None
    at: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One whole answer.

    ``ids`` include the end or stop token; ``text`` does not show it, nor a stop string unless asked
    for. ``kinds`` says of each id whether it was drafted and accepted. ``acceptance`` counts
    drafted, admitted and accepted tokens of this answer (None without a draft). ``seed`` repeats
    the answer; ``stop_reason`` is the token or string that ended it. ``times`` are no part of what
    makes two completions equal.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: EndReason
    stop_reason: int | str | None
    acceptance: AcceptanceCounter | None
    seed: int
    preemptions: int
    times: Times = field(default_factory=lambda: Times(0.0), compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt; ``cached_tokens`` of it came from the prefix cache."""

    id: str
    prompt_ids: tuple[int, ...]
    cached_tokens: int
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text

    @property
    def acceptance(self) -> AcceptanceCounter | None:
        """Counters of all answers together."""
        counters = [c.acceptance for c in self.completions if c.acceptance is not None]
        if not counters:
            return None
        total = AcceptanceCounter(counters[0].block_size)
        for counter in counters:
            total.merge(counter)
        return total


@dataclass(eq=False)
class Answer:
    """State of answer ``index``; ``end_ids`` end it."""

    id: str
    index: int
    request: Request
    params: SamplingParams
    end_ids: frozenset[int]
    seed: int
    text: TextStream | None
    counter: AcceptanceCounter | None
    times: Times
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    step: StepResult | None = None
    count: StepCount | None = None
    finish_reason: EndReason | None = None
    stop_reason: int | str | None = None
    _told: int = 0

    def take(self, result: StepResult) -> None:
        """Add emitted tokens up to the end of the answer; the rest of the run is dropped."""
        before = len(self.request.output)
        self.step, self.count = result, None
        for place, token in enumerate(result.tokens):
            self.request.output.append(token)
            self.kinds.append(result.kinds[place])
            self.starts.append(len(self.text.text) if self.text else 0)
            if result.logprobs:
                self.logprobs.append(result.logprobs[place])
            if self._ends(token):
                break
        if result.count is not None and self.counter is not None:
            # What was accepted behind the end is dropped, and not counted either.
            kept = len(self.request.output) - before
            self.count = replace(result.count, accepted=min(result.count.accepted, kept))
            self.counter.add(self.count)
        if self.finish_reason is not None and self.text is not None:
            self.text.finish()

    def _ends(self, token: int) -> bool:
        enough = len(self.request.output) >= self.params.min_new_tokens
        if token in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.text is not None and self.text.push(token, search=enough):
            self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        elif self.request.room < 1:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def abort(self) -> None:
        """The caller lost interest."""
        self.finish_reason = "abort"
        if self.text is not None:
            self.text.finish()

    def delta(self, at: float) -> Delta:
        """What was added since the last call, by a step that ended ``at`` seconds."""
        start, self._told = self._told, len(self.request.output)
        if start < self._told:
            self.times.first = at if self.times.first is None else self.times.first
            self.times.last = at
        text = self.text.fresh(final=self.finish_reason is not None) if self.text else ""
        return Delta(
            self.id,
            self.index,
            text,
            tuple(self.request.output[start:]),
            tuple(self.logprobs[start:]),
            self.finish_reason,
            self.stop_reason,
            tuple(self.kinds[start:]),
            tuple(self.starts[start:]),
            self.step.rejected if self.step is not None and start < self._told else (),
            self.count if start < self._told else None,
            at,
        )

    def completion(self) -> Completion:
        """The whole answer, once it ended."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            text=self.text.text if self.text else "",
            ids=tuple(self.request.output),
            kinds=tuple(self.kinds),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            acceptance=self.counter,
            seed=self.seed,
            preemptions=self.request.preemptions,
            times=self.times,
        )
