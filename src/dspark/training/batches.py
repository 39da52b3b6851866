"""Which records and anchors each step sees: a pure function of (seed, epoch, step).

Because nothing depends on what ran before, a resumed run sees exactly the rows an uninterrupted
one would have seen. Records of similar length share a batch, which keeps padding small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.config.recipe import TrainSection
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.training.anchors import (
    Blocks,
    build_blocks,
    counted_slots,
    eligible,
    pack_blocks,
    sample_anchors,
)

WINDOW = 8  # batches whose records are sorted by length together


def split_validation(
    records: Sequence[HiddenRecord], share: int = 24
) -> tuple[list[HiddenRecord], list[HiddenRecord]]:
    """Every ``share``-th record by id is held back for evaluation (at least one, never all).

    Records without an anchor can be neither trained nor measured on and belong to no side.

    Raises:
        TrainingError: fewer than two records with an anchor.
    """
    ordered = sorted((r for r in records if len(eligible(r.loss_mask))), key=lambda r: r.id)
    held = ordered[:: max(2, min(share, len(ordered)))]
    names = {r.id for r in held}
    kept = [r for r in ordered if r.id not in names]
    if not kept:
        raise TrainingError(
            expected="at least two answers with an anchor",
            found=f"{len(ordered)}",
            where="training data",
            fix="Generate more prompts.",
        )
    return kept, held


def require_anchors(records: Sequence[HiddenRecord]) -> None:
    """Refuse data on which no loss can be computed (a mask of all zeros or all ones).

    Raises:
        TrainingError: no eligible anchor, or a record whose prompt is supervised too.
    """
    if not any(len(eligible(r.loss_mask)) for r in records):
        raise TrainingError(
            expected="answers of at least two tokens",
            found="no eligible anchor in any record (the loss mask is empty)",
            where="training data",
            fix="Check regenerate: answers may have stopped at once.",
        )
    for record in records:
        if bool(record.loss_mask.all()):
            raise TrainingError(
                expected="a loss mask that leaves the prompt out",
                found="every token supervised",
                where=f"hidden record {record.id}",
                fix="The prompt length was lost: run regenerate and capture again.",
            )


def require_normed(records: Sequence[HiddenRecord]) -> None:
    """Refuse states from before the final norm: their target distribution is another one.

    Raises:
        TrainingError: names the record.
    """
    for record in records:
        if record.norm_state != "post":
            raise TrainingError(
                expected="states after the target's final norm",
                found=f"norm_state {record.norm_state!r}",
                where=f"hidden record {record.id}",
                fix="Apply the target's final norm once (the train stage does).",
            )


def length_buckets(
    lengths: Sequence[int], batch_size: int, batch_tokens: int
) -> list[tuple[int, list[int]]]:
    """(rows of a batch, indices) of every bucket, short ones first.

    A bucket holds lengths between two powers of two, so padding at most doubles a row.
    """
    found: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        found.setdefault((length - 1).bit_length(), []).append(index)
    buckets = []
    for _, rows in sorted(found.items()):
        longest = max(lengths[i] for i in rows)
        buckets.append((max(1, min(batch_size, batch_tokens // longest)), rows))
    return buckets


def cut_rows(lengths: Sequence[int], section: TrainSection) -> list[slice]:
    """Rows in their order, cut into batches that respect ``batch_size`` and ``batch_tokens``."""
    parts, start, longest = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and i - start >= section.batch_of(max(longest, length)):
            parts.append(slice(start, i))
            start, longest = i, 0
        longest = max(longest, length)
    return [*parts, slice(start, len(lengths))] if lengths else []


class Order:
    """Which rows micro-batch ``number`` of the whole run has: a function of seed and number.

    With ``lengths``, rows of similar length share a batch; without, batches are cut as shuffled.
    With ``batch_tokens`` too, rows are put into buckets by length, and a bucket's batches have as
    many rows (at most ``batch_size``, at least one) as its longest row allows.
    """

    def __init__(
        self,
        rows: int,
        lengths: Sequence[int] | None,
        *,
        batch_size: int,
        seed: int,
        batch_tokens: int | None = None,
    ) -> None:
        self.rows, self.lengths = rows, lengths
        self.batch_size, self.seed = batch_size, seed
        self.buckets = None
        self.per_epoch = -(-rows // batch_size)
        if batch_tokens is not None and lengths is not None:
            self.buckets = length_buckets(lengths, batch_size, batch_tokens)
            self.per_epoch = sum(-(-len(found) // size) for size, found in self.buckets)
        self._epoch = -1
        self._batches: list[list[int]] = []

    def at(self, number: int) -> list[int]:
        """Indices of the rows of micro-batch ``number`` (0-based)."""
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_order(epoch)
        return self._batches[index]

    def _epoch_order(self, epoch: int) -> list[list[int]]:
        """Shuffle, sort inside windows, cut into batches, shuffle the batches."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) & 0xFFFFFFFF)
        shuffled = torch.randperm(self.rows, generator=generator).tolist()
        batches = []
        if self.buckets is not None:
            place = {row: i for i, row in enumerate(shuffled)}
            for size, found in self.buckets:
                mixed = sorted(found, key=place.__getitem__)
                batches += [mixed[i : i + size] for i in range(0, len(mixed), size)]
            return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        window = self.batch_size * WINDOW
        for start in range(0, len(shuffled), window):
            part = shuffled[start : start + window]
            if self.lengths is not None:
                part = sorted(part, key=self.lengths.__getitem__)
            batches += [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@dataclass(frozen=True)
class MicroBatch:
    """Records with their sampled anchors, before anything is padded or copied."""

    number: int
    records: list[HiddenRecord]
    anchors: list[Tensor]
    block_size: int
    packed: bool = False

    @staticmethod
    def sample(
        number: int,
        records: list[HiddenRecord],
        *,
        num_anchors: int,
        block_size: int,
        seed: int,
        packed: bool = False,
    ) -> MicroBatch:
        """Anchors of micro-batch ``number``: a function of seed, number and loss masks."""
        generator = torch.Generator().manual_seed((seed * 7_368_787 + number) & 0xFFFFFFFF)
        anchors = [sample_anchors(r.loss_mask, num_anchors, generator) for r in records]
        return MicroBatch(number, records, anchors, block_size, packed)

    @property
    def ids(self) -> list[str]:
        return [record.id for record in self.records]

    def slot_counts(self) -> Tensor:
        """How many blocks count at each slot, int64 [K]: all that the loss's denominator needs."""
        counts = torch.zeros(self.block_size, dtype=torch.long)
        for record, anchors in zip(self.records, self.anchors, strict=True):
            counts += counted_slots(record.loss_mask, anchors, self.block_size).sum(0)
        return counts

    def blocks(self) -> Blocks:
        if self.packed:
            return pack_blocks(self.records, self.anchors, self.block_size)
        return build_blocks(self.records, self.anchors, self.block_size)


class Plan(Protocol):
    """Where a trainer's micro-batches come from. ``number`` counts them over the whole run."""

    @property
    def per_epoch(self) -> int: ...

    def begin(self, first: int, last: int) -> None:
        """Numbers ``first`` to ``last`` (exclusive) will be wanted, in order."""

    def micro_batch(self, number: int) -> MicroBatch: ...

    def release(self, number: int) -> None:
        """Its gradient is in the optimiser."""

    def status(self) -> dict[str, float]:
        """Figures for the log."""


class BatchPlan:
    """Micro-batches of records that are all here; ``batch(n)`` is the n-th of the whole run."""

    def __init__(
        self,
        records: Sequence[HiddenRecord],
        *,
        batch_size: int,
        num_anchors: int,
        block_size: int,
        seed: int,
        by_length: bool = True,
        packed: bool = False,
        batch_tokens: int | None = None,
    ) -> None:
        self.records = [r for r in records if len(eligible(r.loss_mask))]
        self.num_anchors, self.block_size = num_anchors, block_size
        self.seed, self.packed = seed, packed
        lengths = [len(r) for r in self.records] if by_length else None
        self.order = Order(
            len(self.records),
            lengths,
            batch_size=batch_size,
            seed=seed,
            batch_tokens=batch_tokens,
        )

    @property
    def per_epoch(self) -> int:
        return self.order.per_epoch

    def begin(self, first: int, last: int) -> None:
        """Everything is here already."""

    def micro_batch(self, number: int) -> MicroBatch:
        return MicroBatch.sample(
            number,
            [self.records[i] for i in self.order.at(number)],
            num_anchors=self.num_anchors,
            block_size=self.block_size,
            seed=self.seed,
            packed=self.packed,
        )

    def batch(self, number: int) -> Blocks:
        """Micro-batch ``number`` (0-based) with freshly sampled anchors."""
        return self.micro_batch(number).blocks()

    def release(self, number: int) -> None:
        """Records stay for the next epoch."""

    def status(self) -> dict[str, float]:
        return {}
