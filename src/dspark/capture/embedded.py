"""Capture by replay: answers are prefilled through the target and their states are stored.

Replaying is cheaper than it sounds (prefill is several times faster than decoding) and makes the
stage independent of who wrote the answers. Sequences of similar length share a padded batch;
padding lies behind every real token, so a causal target cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.artifacts.progress import OnDone, untold
from dspark.errors import DataError
from dspark.hidden.answers import Answer
from dspark.hidden.record import HiddenRecord, HiddenStore
from dspark.model.cache import shared_prefix
from dspark.model.spans import Span
from dspark.model.target import Target


def length_batches(answers: Sequence[Answer], batch_tokens: int) -> Iterator[list[Answer]]:
    """Batches of similar length whose padded size stays below ``batch_tokens`` (at least one)."""
    batch: list[Answer] = []
    for answer in sorted(answers, key=lambda a: (len(a.ids), a.id)):
        if batch and (len(batch) + 1) * len(answer.ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


@torch.inference_mode()
def capture(
    target: Target,
    answers: Sequence[Answer],
    store: HiddenStore,
    *,
    batch_tokens: int,
    dtype: torch.dtype,
    on_tokens: OnDone = untold,
) -> int:
    """Store one record per answer that is not stored yet; return how many were new.

    ``dtype`` is the stored precision of states. ``log_z`` is computed from the STORED final states,
    so that the trainer's probabilities sum to one in the precision it reads.
    """
    _require_vocabulary(target, answers)
    present = set(store.ids())
    missing = [a for a in answers if a.id not in present]
    on_tokens(sum(len(a.ids) for a in answers if a.id in present), kept=True)
    for record in _replayed(target, missing, batch_tokens, dtype):
        store.put(record)
        on_tokens(len(record))
    return len(missing)


@torch.inference_mode()
def replay_group(
    target: Target, answers: Sequence[Answer], *, batch_tokens: int, dtype: torch.dtype
) -> list[HiddenRecord]:
    """Records of ``answers`` in their order. The same answers give the same bits, whenever."""
    _require_vocabulary(target, answers)
    made = {r.id: r for r in _replayed(target, answers, batch_tokens, dtype)}
    return [made[a.id] for a in answers]


def _replayed(
    target: Target, answers: Sequence[Answer], batch_tokens: int, dtype: torch.dtype
) -> Iterator[HiddenRecord]:
    prefix = _Prefix.of(target, answers)
    for batch in length_batches(answers, batch_tokens):
        for answer, taps, final in prefix.replay(batch):
            yield _record(target, answer, taps, final, dtype)


def engine_name(target: Target) -> str:
    """Who made a record's states: decoder, its precision and torch's version."""
    dtype = str(target.head_weight().dtype).removeprefix("torch.")
    return f"embedded {type(target).__name__} {dtype} torch {torch.__version__}"


@dataclass(frozen=True)
class _Prefix:
    """The tokens all sequences share, run once; every record still gets all of its states."""

    target: Target
    length: int
    cache: Any
    taps: Tensor
    final: Tensor

    @staticmethod
    def of(target: Target, answers: Sequence[Answer]) -> _Prefix:
        length = shared_prefix([a.ids[: a.prompt_length] for a in answers])
        ids = torch.tensor([answers[0].ids[:length]] if answers else [[]], dtype=torch.long)
        cache = target.new_cache(1, max(length, 1))
        if length == 0:
            empty = torch.empty(0)
            return _Prefix(target, 0, cache, empty, empty)
        out = target.forward(ids.to(target.device), Span.at(0, length, 1, target.device), cache)
        return _Prefix(target, length, cache, out.taps[0], out.final[0])

    def replay(self, batch: list[Answer]) -> Iterator[tuple[Answer, Tensor, Tensor]]:
        """States of every answer in ``batch``: taps [S, L, H] and final [S, H]."""
        target, start = self.target, self.length
        longest = max(len(a.ids) for a in batch) - start
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, answer in enumerate(batch):
            ids[row, : len(answer.ids) - start] = torch.tensor(answer.ids[start:])
        cache = None
        span = Span.alone(len(batch), longest, target.device)
        if start:
            cache = target.new_cache(len(batch), start + longest)
            cache.seed(self.cache, start)
            span = Span.at(start, longest, len(batch), target.device)
        out = target.forward(ids.to(target.device), span, cache)
        for row, answer in enumerate(batch):
            own = len(answer.ids) - start
            taps, final = out.taps[row, :own], out.final[row, :own]
            if start:
                taps, final = torch.cat([self.taps, taps]), torch.cat([self.final, final])
            yield answer, taps, final


def _require_vocabulary(target: Target, answers: Sequence[Answer]) -> None:
    """Answers of another tokenizer must not be replayed."""
    for answer in answers:
        if max(answer.ids) >= target.vocab_size:
            raise DataError(
                expected=f"token ids below the target's vocabulary of {target.vocab_size}",
                found=f"id {max(answer.ids)}",
                where=f"answer {answer.id}",
                fix="The answers belong to another target: regenerate them.",
            )


def _record(
    target: Target, answer: Answer, taps: Tensor, final: Tensor, dtype: torch.dtype
) -> HiddenRecord:
    stored = final.to(dtype)
    answered = slice(answer.prompt_length - 1, None)
    logits = target.logits(stored[answered].to(final.dtype)).float()
    return make_record(
        answer,
        taps,
        stored,
        dtype=dtype,
        layer_ids=target.layer_ids,
        greedy=target.logits(final[answered]).argmax(-1),
        log_z=torch.logsumexp(logits, -1),
        engine=engine_name(target),
    )


def make_record(
    answer: Answer,
    taps: Tensor,
    final: Tensor,
    *,
    dtype: torch.dtype,
    layer_ids: tuple[int, ...],
    greedy: Tensor,
    log_z: Tensor,
    engine: str,
) -> HiddenRecord:
    """The record of one replayed answer of S tokens, whichever engine replayed it.

    Args:
        taps: [S, L, H].
        final: [S, H], after the final norm, in ``dtype`` already.
        greedy, log_z: from the last token of the prompt on, [S - prompt_length + 1].
        engine: who made the states.
    """
    length, answered = len(answer.ids), slice(answer.prompt_length - 1, None)
    every_greedy = torch.full((length,), -1, dtype=torch.int32)
    every_greedy[answered] = greedy.int().cpu()
    every_log_z = torch.full((length,), float("nan"))
    every_log_z[answered] = log_z.float().cpu()
    return HiddenRecord(
        id=answer.id,
        category=answer.category,
        temperature=answer.temperature,
        layer_ids=layer_ids,
        norm_state="post",
        ids=torch.tensor(answer.ids, dtype=torch.int32),
        loss_mask=torch.tensor(answer.loss_mask, dtype=torch.uint8),
        taps=taps.to(dtype).cpu(),
        final=final.cpu(),
        greedy=every_greedy,
        log_z=every_log_z,
        engine=engine,
    )
