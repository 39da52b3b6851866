"""One conversation with the target: what is asked next, and which rows come of it.

Turn by turn, each with the target's own earlier answers. The state machine does not know who
answers: it says what to ask (:class:`Ask`) and takes what came back (:class:`Reply`). All ids in
its rows are ids that the engine said it read or wrote.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dspark.config.answers import RegenerateSection
from dspark.data.prompt import Prompt
from dspark.data.reasoning import as_history, assistant_turn, split_reasoning
from dspark.decoding.params import SamplingParams
from dspark.hidden.answers import Answer, Counts, Finish, Generation, Sampling

EMBEDDED = "embedded"
"""Stands for a server where our own engine answers in this process."""


@dataclass(frozen=True)
class Maker:
    """Who answered: the model's name and revision, and the server (``embedded``: no server)."""

    model: str
    revision: str | None
    server: str


@dataclass(frozen=True)
class Ask:
    """What to ask: ``messages``, or, to go on with a cut answer, the ids so far."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    params: SamplingParams
    so_far: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reply:
    """What came back. ``prompt_ids`` is what the engine read, ``ids`` what it generated, the
    end-of-turn token included; ``written`` the text of ``ids`` without that token."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: Finish
    written: str
    content: str
    reasoning: str | None
    maker: Maker
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning_tokens: int | None = None


def answer_seed(prompt_id: str, turn: int = 0, part: int = 0) -> int:
    """A request's seed depends on its prompt's id, its turn, and how often it was continued."""
    name = prompt_id if turn == part == 0 else f"{prompt_id}/{turn}/{part}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def temperature_of(prompt_id: str, section: RegenerateSection) -> float:
    """One of the section's temperatures, by a hash of the id: whatever else is in the set."""
    digest = hashlib.sha256(f"temperature/{prompt_id}".encode()).digest()
    return section.temperatures[int.from_bytes(digest[:8], "big") % len(section.temperatures)]


@dataclass
class _Segment:
    """A row in the making."""

    ids: list[int]
    mask: list[int]
    messages: list[dict[str, Any]]
    turns: int
    reasoning: int | None
    finish: Finish
    seed: int
    maker: Maker


@dataclass
class Conversation:
    """Asks the turns of one prompt; ``tally`` counts how they ended, and why it ended early.

    Where tool calls are not read from the text (``reads_calls``), a prompt with tools is asked its
    first turn only: an answer that calls one must not be followed by the user's next question.
    """

    prompt: Prompt
    section: RegenerateSection
    reads_calls: bool = True
    tally: Counter[str] = field(default_factory=Counter)
    ended: bool = False
    _segments: list[_Segment] = field(default_factory=list)
    _said: list[dict[str, Any]] = field(default_factory=list)
    _past: list[dict[str, Any]] = field(default_factory=list)
    _turn: int = 0
    _part: int = 0
    _taken: int = 0
    _cut: Reply | None = None

    def __post_init__(self) -> None:
        self._said = [dict(message) for message in self.prompt.messages]
        self._past = [dict(message) for message in self.prompt.messages]
        self.temperature = temperature_of(self.prompt.id, self.section)
        self.questions = self.prompt.later_turns[: self.section.turns - 1]
        if self.prompt.tools and not self.reads_calls:
            self.questions = []
        if left := len(self.prompt.later_turns) - len(self.questions):
            why = "an answer with tools" if self.prompt.tools else "regenerate.turns"
            self.tally[f"later turns after {why}"] += left

    def ask(self) -> Ask:
        """What to ask now (not after the end)."""
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.section.top_p if self.temperature else 1.0,
            seed=answer_seed(self.prompt.id, self._turn, self._part),
            max_new_tokens=self.section.max_new_tokens,
        )
        so_far = None if self._cut is None else self._cut.prompt_ids + self._cut.ids
        return Ask(list(self._past), self.prompt.tools, params, so_far)

    def take(self, reply: Reply) -> None:
        """Go on with an answer."""
        if self._cut is not None:
            reply = _joined(self._cut, reply)
            self._cut = None
        if reply.finish_reason == "length" and self._goes_on():
            self._part += 1
            self._cut = reply
            return
        self._taken += 1
        self.tally[f"finish {reply.finish_reason}"] += 1
        if reply.finish_reason == "length" and self.section.on_length == "drop":
            self.tally["dropped truncated"] += 1
            self.end("truncated")
            return
        self._keep(reply)
        if reply.finish_reason != "stop" or not reply.written.strip():
            self.end("not whole" if reply.written.strip() else "empty")
        elif self._turn == len(self.questions):
            self.ended = True
        else:
            question = {"role": "user", "content": self.questions[self._turn]}
            self._said.append(question)
            self._past.append(question)
            self._turn, self._part = self._turn + 1, 0

    def end(self, why: str) -> None:
        """Ask nothing more; later turns that were to be asked are counted with the reason, and so
        is a first turn that was not asked."""
        if not self._taken:
            self.tally[f"dropped {why}"] += 1
        left = len(self.questions) - max(self._taken - 1, 0)
        if left:
            self.tally[f"later turns after {why}"] += left
        self.ended = True

    def _goes_on(self) -> bool:
        return self.section.on_length == "continue" and self._part < self.section.continuations

    def _keep(self, reply: Reply) -> None:
        message = assistant_turn(reply.content, reply.reasoning, reply.tool_calls)
        self._said.append(message)
        self._past.append(as_history(message, reply.written, self.section.history_reasoning))
        segment = self._segment(reply)
        segment.ids += reply.ids
        segment.mask += [1] * len(reply.ids)
        segment.messages = list(self._said)
        segment.turns += 1
        segment.finish = reply.finish_reason
        segment.seed = answer_seed(self.prompt.id, self._turn, 0)
        if reply.reasoning_tokens is not None:
            segment.reasoning = (segment.reasoning or 0) + reply.reasoning_tokens

    def _segment(self, reply: Reply) -> _Segment:
        """The row that this answer continues, brought up to the answer's prompt, or a new one."""
        if self._segments:
            last = self._segments[-1]
            size = len(last.ids)
            if list(reply.prompt_ids[:size]) == last.ids:
                last.ids += reply.prompt_ids[size:]
                last.mask += [0] * (len(reply.prompt_ids) - size)
                last.maker = reply.maker
                return last
        ids = list(reply.prompt_ids)
        self._segments.append(_Segment(ids, [0] * len(ids), [], 0, None, "stop", 0, reply.maker))
        return self._segments[-1]

    def rows(self) -> list[Answer]:
        """Rows to train on. One without two trained tokens in a row has no anchor: it is left out,
        and counted as empty. Call it once, at the end."""
        rows = []
        for number, segment in enumerate(self._segments):
            pairs = zip(segment.mask, segment.mask[1:], strict=False)
            if (1, 1) in set(pairs):
                rows.append(self._row(segment, number))
            else:
                self.tally["dropped empty"] += 1
        return rows

    def _row(self, segment: _Segment, number: int) -> Answer:
        prompt, maker = self.prompt, segment.maker
        before = segment.mask.index(1)
        sampling = Sampling(
            temperature=self.temperature,
            top_p=self.section.top_p if self.temperature else 1.0,
            max_new_tokens=self.section.max_new_tokens,
            seed=segment.seed,
        )
        counts = Counts(
            prompt=before,
            generated=sum(segment.mask),
            reasoning=segment.reasoning,
            turns=segment.turns,
        )
        return Answer(
            id=f"{prompt.id}-{number}" if number else prompt.id,
            prompt=prompt.id,
            category=prompt.category,
            source=prompt.source,
            language=prompt.language,
            temperature=self.temperature,
            prompt_length=before,
            finish_reason=segment.finish,
            ids=tuple(segment.ids),
            loss_mask=tuple(1 if trained else 0 for trained in segment.mask),
            messages=segment.messages,
            tools=prompt.tools,
            generation=Generation(
                model=maker.model,
                revision=maker.revision,
                server=maker.server,
                sampling=sampling,
                effort=self.section.effort,
                finish_reason=segment.finish,
                counts=counts,
            ),
        )


def _joined(first: Reply, second: Reply) -> Reply:
    """An answer and its continuation as one."""
    written = first.written + second.written
    reasoning, content = split_reasoning(written)
    return Reply(
        prompt_ids=first.prompt_ids,
        ids=first.ids + second.ids,
        finish_reason=second.finish_reason,
        written=written,
        content=content,
        reasoning=reasoning,
        maker=second.maker,
    )
