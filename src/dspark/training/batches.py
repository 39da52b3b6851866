"""Which records and anchors each step sees: a pure function of (seed, epoch, step).

Because nothing depends on what ran before, a resumed run sees exactly the rows an uninterrupted
one would have seen. Records of similar length share a batch, which keeps padding small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.training.anchors import Blocks, build_blocks, eligible, sample_anchors

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


class BatchPlan:
    """The order of batches; ``batch(n)`` is the n-th micro-batch of the whole run."""

    def __init__(
        self,
        records: Sequence[HiddenRecord],
        *,
        batch_size: int,
        num_anchors: int,
        block_size: int,
        seed: int,
    ) -> None:
        self.records = [r for r in records if len(eligible(r.loss_mask))]
        self.batch_size = batch_size
        self.num_anchors = num_anchors
        self.block_size = block_size
        self.seed = seed
        self.per_epoch = -(-len(self.records) // batch_size)
        self._epoch = -1
        self._order: list[list[int]] = []

    def _epoch_order(self, epoch: int) -> list[list[int]]:
        """Shuffle, sort inside windows, cut into batches, shuffle the batches."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) & 0xFFFFFFFF)
        shuffled = torch.randperm(len(self.records), generator=generator).tolist()
        batches = []
        window = self.batch_size * WINDOW
        for start in range(0, len(shuffled), window):
            part = sorted(shuffled[start : start + window], key=lambda i: len(self.records[i]))
            batches += [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def batch(self, number: int) -> Blocks:
        """Micro-batch ``number`` (0-based) with freshly sampled anchors."""
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        chosen = [self.records[i] for i in self._order[index]]
        generator = torch.Generator().manual_seed((self.seed * 7_368_787 + number) & 0xFFFFFFFF)
        anchors = [sample_anchors(r.loss_mask, self.num_anchors, generator) for r in chosen]
        return build_blocks(chosen, anchors, self.block_size)
