"""Measuring a draft in this process: acceptance, identity and speed, both arms of one engine.

Every held-out prompt is decoded once by each arm, interleaved; at temperature 0 the texts must be
identical. Speed is measured on a few prompts per group, plain and draft in turn, several times;
a repeat's speed is its tokens over its seconds and the figure is the median over repeats. Nothing
here imports an engine: decoders are handed in.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.artifacts.progress import OnDone, untold
from dspark.bench.journal import Journal, Key, Pair
from dspark.bench.results import (
    ArmSpeed,
    BenchArm,
    Piece,
    PromptGroup,
    PromptResult,
    Sample,
    Speed,
    SummaryResult,
)
from dspark.config.recipe import BenchSection
from dspark.decoding.acceptance import AcceptanceCounter, bootstrap_interval
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import Generation, LocalDecoder


@dataclass(frozen=True)
class BenchPrompt:
    """A held-out prompt: its text as shown in the report and its ids as decoded."""

    id: str
    category: str
    text: str
    ids: list[int]


@dataclass
class _Repeat:
    """Tokens and seconds of both arms in one repeat."""

    plain_tokens: int = 0
    plain_seconds: float = 0.0
    draft_tokens: int = 0
    draft_seconds: float = 0.0

    def add(self, other: _Repeat) -> None:
        self.plain_tokens += other.plain_tokens
        self.plain_seconds += other.plain_seconds
        self.draft_tokens += other.draft_tokens
        self.draft_seconds += other.draft_seconds


@dataclass
class _Measured:
    """One (category, temperature) before it is turned into JSON."""

    category: str
    group: PromptGroup
    temperature: float
    counter: AcceptanceCounter
    prompts: list[PromptResult] = field(default_factory=list)
    per_prompt: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    identical: int = 0
    repeats: list[_Repeat] = field(default_factory=list)
    sample: Sample | None = None


class LocalBench:
    """Runs a :class:`BenchSection` over prompts with a plain and a drafting decoder."""

    def __init__(
        self,
        plain: LocalDecoder,
        drafting: LocalDecoder,
        section: BenchSection,
        block_size: int,
        decode_text: Callable[[list[int]], str],
        workload: Sequence[str],
        on_pair: OnDone = untold,
        journal: Journal | None = None,
    ) -> None:
        self.plain, self.drafting, self.section = plain, drafting, section
        self.block_size, self.decode_text, self.workload = block_size, decode_text, workload
        self.on_pair = on_pair
        self.journal = Journal() if journal is None else journal

    def decodings(self, prompts: Sequence[BenchPrompt]) -> int:
        """How often ``on_pair`` will be called: one call per prompt decoded by both arms."""
        groups = _by_category(prompts)
        repeated = sum(min(self._timed(c, groups), len(own)) for c, own in groups.items())
        once = len(prompts) + repeated * (self.section.repeats - 1)
        return once * len(self.section.temperatures)

    def run(self, prompts: Sequence[BenchPrompt]) -> tuple[list[BenchArm], list[SummaryResult]]:
        """All arms, and the pooled rows of ``summary.json``."""
        groups = _by_category(prompts)
        self.journal.keep_whole(self._timing_groups(groups))
        measured = [
            self._measure(category, own, temperature, self._timed(category, groups))
            for temperature in self.section.temperatures
            for category, own in groups.items()
        ]
        return [self._arm(m) for m in measured], self._rows(measured)

    def _group(self, category: str) -> PromptGroup:
        return "workload" if category in self.workload else "general"

    def _timed(self, category: str, groups: dict[str, list[BenchPrompt]]) -> int:
        """Timed prompts of a category: its share of the group's ``speed_prompts`` (may be 0)."""
        peers = [c for c in groups if self._group(c) == self._group(category)]
        each, rest = divmod(self.section.speed_prompts, len(peers))
        return each + (peers.index(category) < rest)

    def _timing_groups(self, groups: dict[str, list[BenchPrompt]]) -> list[set[Key]]:
        """Decodings whose seconds make one row of the summary: all of one process, or none."""
        timed: dict[tuple[PromptGroup, float], set[Key]] = {}
        for temperature in self.section.temperatures:
            for category, own in groups.items():
                timed.setdefault((self._group(category), temperature), set()).update(
                    Key(prompt.id, temperature, repeat)
                    for prompt in own[: self._timed(category, groups)]
                    for repeat in range(self.section.repeats)
                )
        return list(timed.values())

    def _measure(
        self, category: str, prompts: Sequence[BenchPrompt], temperature: float, timed: int
    ) -> _Measured:
        group = self._group(category)
        out = _Measured(category, group, temperature, AcceptanceCounter(self.block_size))
        first = _Repeat()
        for number, prompt in enumerate(prompts):
            plain, draft, timing = self._pair(prompt, temperature, 0)
            if number < timed:
                first.add(timing)
            self._count(out, prompt, plain, draft)
        out.repeats.append(first)
        for number in range(1, self.section.repeats):
            repeat = _Repeat()
            for prompt in prompts[:timed]:
                repeat.add(self._pair(prompt, temperature, number)[2])
            out.repeats.append(repeat)
        return out

    def _pair(
        self, prompt: BenchPrompt, temperature: float, repeat: int
    ) -> tuple[Generation, Generation, _Repeat]:
        """One prompt through both arms, one after the other; or as an earlier process did it."""
        key = Key(prompt.id, temperature, repeat)
        pair = self.journal.get(key)
        kept = pair is not None
        if pair is None:
            pair = self._decode(prompt, temperature)
            self.journal.add(key, pair)
        self.on_pair(kept=kept)
        plain, draft = pair.plain, pair.draft
        timing = _Repeat(len(plain.ids), pair.plain_seconds, len(draft.ids), pair.draft_seconds)
        return plain, draft, timing

    def _decode(self, prompt: BenchPrompt, temperature: float) -> Pair:
        params = SamplingParams(
            temperature=temperature,
            # A seed of its own, or draws would be the same for every prompt.
            seed=zlib.crc32(f"{self.section.seed}/{prompt.id}".encode()),
            max_new_tokens=self.section.max_new_tokens,
        )
        start = time.perf_counter()
        plain = self.plain.generate(prompt.ids, params)
        middle = time.perf_counter()
        draft = self.drafting.generate(prompt.ids, params)
        end = time.perf_counter()
        return Pair(plain, draft, middle - start, end - middle)

    def _count(
        self, out: _Measured, prompt: BenchPrompt, plain: Generation, draft: Generation
    ) -> None:
        counter = draft.counter
        assert counter is not None
        out.counter.merge(counter)
        out.tokens += len(draft.ids)
        out.identical += plain.ids == draft.ids
        out.per_prompt.append((counter.accepted, counter.steps))
        out.prompts.append(
            PromptResult(
                id=prompt.id,
                acceptance_length=counter.acceptance_length if counter.steps else None,
                steps=counter.steps,
                tokens=len(draft.ids),
            )
        )
        if out.sample is None:
            out.sample = self._sample(prompt, draft)

    def _sample(self, prompt: BenchPrompt, draft: Generation) -> Sample:
        """Text of every token as the difference of two decodings, so that spaces come out right."""
        pieces, before = [], ""
        for end, kind in enumerate(draft.kinds, 1):
            text = self.decode_text(draft.ids[:end])
            # A token that ends inside a multi-byte character shows as a replacement mark until
            # the next one completes it; its text is then given to the completing token.
            if text.endswith("�"):
                pieces.append(Piece(text="", kind=kind))
                continue
            pieces.append(Piece(text=text[len(before) :], kind=kind))
            before = text
        return Sample(prompt=prompt.text, pieces=tuple(pieces))

    def _arm(self, m: _Measured) -> BenchArm:
        steps = m.counter.steps
        return BenchArm(
            category=m.category,
            group=m.group,
            temperature=m.temperature,
            prompt_count=len(m.prompts),
            acceptance_length=m.counter.acceptance_length if steps else None,
            ci95=self._interval(m.per_prompt),
            per_slot_acceptance=tuple(a / max(steps, 1) for a in m.counter.accepted_at),
            drafted=m.counter.drafted,
            admitted=m.counter.admitted,
            accepted=m.counter.accepted,
            steps=steps,
            tokens=m.tokens,
            prompts=tuple(m.prompts),
            tokens_per_second=_speed(m.repeats),
            identical=(m.identical, len(m.prompts)) if m.temperature == 0 else None,
            sample=m.sample,
        )

    def _interval(self, pairs: list[tuple[int, int]]) -> tuple[float, float] | None:
        """95 % over prompts; None for fewer than two with steps, which say nothing of others."""
        if sum(steps > 0 for _, steps in pairs) < 2:
            return None
        return bootstrap_interval(pairs, seed=self.section.seed)

    def _rows(self, measured: list[_Measured]) -> list[SummaryResult]:
        """Categories of a group pooled: counters, prompts and timings add up."""
        rows = []
        keys = dict.fromkeys((m.group, m.temperature) for m in measured)
        for group, temperature in keys:
            own = [m for m in measured if (m.group, m.temperature) == (group, temperature)]
            pairs = [pair for m in own for pair in m.per_prompt]
            repeats = [_Repeat() for _ in own[0].repeats]
            for m in own:
                for total, repeat in zip(repeats, m.repeats, strict=True):
                    total.add(repeat)
            speed = _speed(repeats)
            assert speed is not None, "every group times at least one prompt"
            accepted, steps = (sum(column) for column in zip(*pairs, strict=True))
            prompts = sum(len(m.prompts) for m in own)
            rows.append(
                SummaryResult(
                    prompts=group,
                    temperature=temperature,
                    acceptance_length=1 + accepted / steps if steps else None,
                    ci95=self._interval(pairs),
                    tokens_per_second=Speed(plain=speed.plain, draft=speed.draft),
                    speedup=speed.draft / speed.plain,
                    identical_to_plain=(sum(m.identical for m in own), prompts)
                    if temperature == 0
                    else None,
                )
            )
        return rows


def _by_category(prompts: Sequence[BenchPrompt]) -> dict[str, list[BenchPrompt]]:
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def _speed(repeats: list[_Repeat]) -> ArmSpeed | None:
    """Medians over repeats; None when nothing was timed."""
    if any(r.plain_seconds == 0 for r in repeats):
        return None
    plain = [r.plain_tokens / r.plain_seconds for r in repeats]
    draft = [r.draft_tokens / r.draft_seconds for r in repeats]
    return ArmSpeed(
        plain=statistics.median(plain),
        draft=statistics.median(draft),
        plain_repeats=tuple(plain),
        draft_repeats=tuple(draft),
    )


def as_json(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Frozen results as plain dictionaries."""
    return [row.model_dump(mode="json") for row in rows]
