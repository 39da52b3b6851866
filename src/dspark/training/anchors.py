"""Blocks for training: which anchors, what each slot must predict, and who may see whom.

An anchor is a committed token whose successor is also part of the answer. Each chosen anchor
becomes a block ``[anchor, MASK x (K-1)]`` appended behind the sequence; all blocks of a sequence
run in one pass under a dense mask. Contract, section 4; one predicate (:func:`visible`) defines the
mask for every backend.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dspark.hidden.record import HiddenRecord


@dataclass(frozen=True)
class Blocks:
    """A padded batch. B records, S tokens, A anchors, K slots, L taps, H hidden.

    ``taps``, ``final``, ``log_z``, ``greedy`` and ``ids`` [B, S, ...] are the records', padded.
    ``labels`` [B, A, K] token of slot k (position a+k+1); ``previous`` [B, A, K] token at a+k
    (slot 0: the anchor), the Markov head's teacher-forced input; ``source`` [B, A, K] position a+k,
    whose final state gives the target distribution; ``slot_mask`` [B, A, K] slots that count.
    """

    taps: Tensor
    final: Tensor
    log_z: Tensor
    greedy: Tensor
    ids: Tensor
    anchors: Tensor
    keep: Tensor
    labels: Tensor
    previous: Tensor
    source: Tensor
    slot_mask: Tensor
    attention: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on ``device``."""
        return Blocks(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def positions(self) -> Tensor:
        """RoPE positions of block rows [B, A*K]: slot k of anchor a sits at a + k."""
        k = torch.arange(self.labels.shape[-1], device=self.anchors.device)
        return (self.anchors.unsqueeze(-1) + k).flatten(1)


def eligible(loss_mask: Tensor) -> Tensor:
    """loss_mask [S] -> positions a with loss_mask[a] = loss_mask[a+1] = 1, ascending int64."""
    mask = loss_mask.bool()
    return (mask[:-1] & mask[1:]).nonzero().squeeze(-1)


def sample_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Up to ``count`` eligible anchors, uniform without replacement, ascending."""
    candidates = eligible(loss_mask)
    if len(candidates) > count:
        order = torch.randperm(len(candidates), generator=generator)[:count]
        candidates = candidates[order].sort().values
    return candidates


def visible(anchor: Tensor, query_block: Tensor, key_position: Tensor, key_block: Tensor) -> Tensor:
    """May a block row see a key? ``key_block`` is -1 for context rows.

    Context rows strictly before the anchor (the target's state at the anchor does not exist yet
    when serving), and every row of the same block, in both directions.
    """
    is_context = key_block < 0
    return (is_context & (key_position < anchor)) | (~is_context & (key_block == query_block))


def attention_mask(anchors: Tensor, lengths: Tensor, size: int, k: int) -> Tensor:
    """Dense mask [B, 1, A*K, S + A*K] from anchors [B, A].

    Padding anchors (0) see only their own block: nobody reads them, and no row is ever empty.
    """
    batch, count = anchors.shape
    device = anchors.device
    query_block = torch.arange(count, device=device).repeat_interleave(k)
    context = torch.arange(size, device=device)
    key_position = torch.cat([context, query_block.new_zeros(count * k)])
    key_block = torch.cat([context.new_full((size,), -1), query_block])
    anchor = anchors.repeat_interleave(k, dim=1).unsqueeze(-1)
    mask = visible(anchor, query_block.view(1, -1, 1), key_position, key_block)
    real = (key_block >= 0) | (key_position < lengths.view(batch, 1, 1))
    return (mask & real).unsqueeze(1)


def build_blocks(records: list[HiddenRecord], anchors: list[Tensor], block_size: int) -> Blocks:
    """Pad records and their anchors to one batch; every padded thing is masked out."""
    batch, size = len(records), max(len(r) for r in records)
    count = max(1, *(len(a) for a in anchors))
    first = records[0]
    taps = first.taps.new_zeros(batch, size, *first.taps.shape[1:])
    final = first.final.new_zeros(batch, size, first.final.shape[-1])
    log_z = torch.zeros(batch, size)
    greedy = torch.full((batch, size), -1)
    ids = torch.zeros(batch, size, dtype=torch.long)
    loss_mask = torch.zeros(batch, size, dtype=torch.bool)
    where = torch.zeros(batch, count, dtype=torch.long)
    keep = torch.zeros(batch, count, dtype=torch.bool)
    for row, (record, chosen) in enumerate(zip(records, anchors, strict=True)):
        n = len(record)
        taps[row, :n], final[row, :n], log_z[row, :n] = record.taps, record.final, record.log_z
        greedy[row, :n] = record.greedy.long()
        ids[row, :n], loss_mask[row, :n] = record.ids.long(), record.loss_mask.bool()
        where[row, : len(chosen)], keep[row, : len(chosen)] = chosen, True
    slots = torch.arange(block_size)
    source = where.unsqueeze(-1) + slots
    label_at = source + 1
    inside = label_at < size
    rows = torch.arange(batch).view(-1, 1, 1)
    label_at, source = label_at.clamp(max=size - 1), source.clamp(max=size - 1)
    counted = inside & loss_mask[rows, label_at] & keep.unsqueeze(-1)
    lengths = torch.tensor([len(r) for r in records])
    return Blocks(
        taps=taps,
        final=final,
        log_z=log_z,
        greedy=greedy,
        ids=ids,
        anchors=where,
        keep=keep,
        labels=ids[rows, label_at],
        previous=ids[rows, source],
        source=source,
        # Cumulative: after the first slot that does not count, none does.
        slot_mask=counted.long().cumprod(-1).bool(),
        attention=attention_mask(where, lengths, size, block_size),
    )
