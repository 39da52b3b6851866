"""Blocks for training: which anchors, what each slot must predict, and who may see whom.

An anchor is a committed token whose successor is also part of the answer. Each chosen anchor
becomes a block ``[anchor, MASK x (K-1)]`` appended behind the sequence; all blocks of a sequence
run in one pass. Contract, section 4; one predicate (:func:`visible`) defines the mask, whole
(:func:`attention_mask`), in windows of neighbouring blocks (:func:`attention_windows`) or inside a
GPU's kernel (:meth:`Blocks.flexible`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.hidden.record import HiddenRecord
from dspark.model.windows import Mask, Window, Windows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

WINDOWS, NEIGHBOURS = 16, 16  # at most so many windows, of at least so many blocks


@dataclass(frozen=True)
class Blocks:
    """A padded batch. B records, S tokens, A anchors, K slots, L taps, H hidden.

    ``taps``, ``final``, ``log_z``, ``greedy`` and ``ids`` [B, S, ...] are the records', padded.
    ``labels`` [B, A, K] token of slot k (position a+k+1); ``previous`` [B, A, K] token at a+k
    (slot 0: the anchor), the Markov head's teacher-forced input; ``source`` [B, A, K] position a+k,
    whose final state gives the target distribution; ``slot_mask`` [B, A, K] slots that count.
    A row may hold several documents: ``first`` [B, A] is where an anchor's document begins, and
    ``context_positions`` [B, S] are RoPE positions, which begin anew in each.
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
    attention: Mask
    first: Tensor
    context_positions: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on ``device``."""
        return Blocks(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def flexible(self) -> BlockMask:
        """The mask for ``flex_attention``, on the device where the blocks are."""
        from torch.nn.attention.flex_attention import create_block_mask

        (batch, count, k), size = self.labels.shape, self.ids.shape[1]

        def allowed(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // k
            key_block = torch.where(key < size, -1, (key - size) // k)
            return visible(self.anchors[b, block], block, key, key_block, self.first[b, block])

        rows, device = count * k, self.anchors.device
        return create_block_mask(allowed, batch, None, rows, size + rows, device=device.type)

    @property
    def positions(self) -> Tensor:
        """RoPE positions of block rows [B, A*K]: slot k of anchor a is a + k of its document."""
        k = torch.arange(self.labels.shape[-1], device=self.anchors.device)
        return ((self.anchors - self.first).unsqueeze(-1) + k).flatten(1)


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


def counted_slots(loss_mask: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Slots [A, K] of one record that count: label inside, supervised, and so all before it."""
    label_at = anchors.unsqueeze(-1) + 1 + torch.arange(k)
    inside = label_at < len(loss_mask)
    counted = inside & loss_mask.bool()[label_at.clamp(max=len(loss_mask) - 1)]
    return counted.long().cumprod(-1).bool()


def visible(
    anchor: Tensor,
    query_block: Tensor,
    key_position: Tensor,
    key_block: Tensor,
    first: Tensor | int = 0,
) -> Tensor:
    """May a block row see a key? ``key_block`` is -1 for context rows.

    Context rows of its document (from ``first`` on) strictly before the anchor (the target's state
    at the anchor does not exist yet when serving), and every row of the same block, in both
    directions.
    """
    is_context = key_block < 0
    before = (key_position < anchor) & (key_position >= first)
    return (is_context & before) | (~is_context & (key_block == query_block))


def attention_mask(
    anchors: Tensor, lengths: Tensor, size: int, k: int, first: Tensor | None = None
) -> Tensor:
    """Dense mask [B, 1, A*K, S + A*K] from anchors [B, A] and their documents' beginnings.

    Padding anchors (0) see only their own block: nobody reads them, and no row is ever empty.
    """
    return _mask(anchors, lengths, (0, size), k, first)


def _mask(
    anchors: Tensor, lengths: Tensor, context: tuple[int, int], k: int, first: Tensor | None
) -> Tensor:
    """Mask of these blocks over the positions ``context`` (from, to) and themselves."""
    batch, count = anchors.shape
    device = anchors.device
    query_block = torch.arange(count, device=device).repeat_interleave(k)
    seen = torch.arange(*context, device=device)
    key_position = torch.cat([seen, query_block.new_zeros(count * k)])
    key_block = torch.cat([seen.new_full(seen.shape, -1), query_block])
    anchor = anchors.repeat_interleave(k, dim=1).unsqueeze(-1)
    begin = 0 if first is None else first.repeat_interleave(k, dim=1).unsqueeze(-1)
    mask = visible(anchor, query_block.view(1, -1, 1), key_position, key_block, begin)
    real = (key_block >= 0) | (key_position < lengths.view(batch, 1, 1))
    return (mask & real).unsqueeze(1)


Bounds = list[tuple[tuple[int, int], tuple[int, int]]]
"""Block rows and context positions, both (from, to), of every window."""


def bounds_of(highest: list[int], k: int, lowest: list[int] | None = None) -> Bounds:
    """Windows of blocks of ``k`` rows that see no context outside of [lowest, highest)."""
    count = len(highest)
    each = max(NEIGHBOURS, -(-count // WINDOWS))
    bounds = []
    for start in range(0, count, each):
        part = slice(start, min(count, start + each))
        low = 0 if lowest is None else min(lowest[part])
        high = max(low, *highest[part])
        bounds.append(((part.start * k, part.stop * k), (low, high)))
    return bounds


def attention_windows(
    anchors: Tensor, lengths: Tensor, size: int, k: int, first: Tensor | None = None
) -> Windows:
    """:func:`attention_mask` in windows, which are small where anchors ascend."""
    parts = []
    lowest = None if first is None else first.amin(0).tolist()
    for rows, context in bounds_of(anchors.amax(0).tolist(), k, lowest):
        part = slice(rows[0] // k, rows[1] // k)
        begin = None if first is None else first[:, part]
        mask = _mask(anchors[:, part], lengths, context, k, begin)
        parts.append(Window(rows, context, mask[..., : context[1] - context[0]]))
    return Windows(size, k, tuple(parts))


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
        attention=attention_windows(where, lengths, size, block_size),
        first=torch.zeros_like(where),
        context_positions=torch.arange(size).expand(batch, -1),
    )


def pack_blocks(records: list[HiddenRecord], anchors: list[Tensor], block_size: int) -> Blocks:
    """One row of all documents behind one another, without padding.

    Each is cut behind its last block: what lies there nobody sees. Blocks see their own document
    only, and positions begin anew in each, so that packed, padded and alone give the same rows.
    """
    kept = [
        min(len(r), int(a.max()) + block_size + 1) if len(a) else 0
        for r, a in zip(records, anchors, strict=True)
    ]
    if not any(kept):
        return build_blocks(records, anchors, block_size)
    begins = [sum(kept[:i]) for i in range(len(kept))]

    def joined(name: str) -> Tensor:
        parts = [getattr(r, name)[:n] for r, n in zip(records, kept, strict=True)]
        return torch.cat(parts).unsqueeze(0)

    each = [a + b for a, b in zip(anchors, begins, strict=True)]
    where, size = torch.cat(each), sum(kept)
    first = torch.cat([torch.full_like(a, b) for a, b in zip(anchors, begins, strict=True)])
    ids = joined("ids").long()
    source = (where.unsqueeze(-1) + torch.arange(block_size)).clamp(max=size - 1)
    label_at = (source + 1).clamp(max=size - 1)
    counted = [
        counted_slots(r.loss_mask, a, block_size) for r, a in zip(records, anchors, strict=True)
    ]
    return Blocks(
        taps=joined("taps"),
        final=joined("final"),
        log_z=joined("log_z"),
        greedy=joined("greedy").long(),
        ids=ids,
        anchors=where.unsqueeze(0),
        keep=torch.ones(1, len(where), dtype=torch.bool),
        labels=ids[0][label_at].unsqueeze(0),
        previous=ids[0][source].unsqueeze(0),
        source=source.unsqueeze(0),
        slot_mask=torch.cat(counted).unsqueeze(0),
        attention=attention_windows(
            where.unsqueeze(0), torch.tensor([size]), size, block_size, first.unsqueeze(0)
        ),
        first=first.unsqueeze(0),
        context_positions=torch.cat([torch.arange(n) for n in kept]).unsqueeze(0),
    )
