"""Spans: the stretch of new tokens of one forward, where it starts and how far attention may look.

A span is computed once per forward and shared by all layers. :class:`Span` is a batch of equal
lengths over contiguous rows, :class:`PagedSpan` the tokens of many requests in one flat row over
pages. Where rows and states lie is none of its business (``dspark.model.cache``,
``dspark.model.paged``, ``dspark.model.states``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None, bool], Tensor]
"""``(queries, rows, mask, causal)`` -> [B, T, ...]: queries [B, T, ...] over parts of rows
[B, heads, N, width]. ``mask`` and ``causal`` are a :class:`Span`'s."""

SAVED = 4096  # pairs of query and key that are worth a group of their own, at least
READ = 2  # queries whose work a key costs by being read at all


@dataclass(frozen=True)
class Span:
    """New tokens [B, T] of one forward, at ``positions``; row ``t`` may see keys 0..position."""

    positions: Tensor
    start: int | None
    reach: int
    mask: Tensor | None
    causal: bool

    @staticmethod
    def alone(batch: int, length: int, device: torch.device) -> Span:
        """A whole sequence without a cache: plain causal attention."""
        positions = torch.arange(length, device=device).expand(batch, -1)
        return Span(positions, 0, length, None, causal=length > 1)

    @staticmethod
    def at(start: int, length: int, batch: int, device: torch.device) -> Span:
        """Every slot continues at the same position ``start``."""
        positions = torch.arange(start, start + length, device=device).expand(batch, -1)
        reach = start + length
        if length == 1 or start == 0:
            return Span(positions, start, reach, None, causal=length > 1)
        keys = torch.arange(reach, device=device)
        mask = keys <= positions[0].unsqueeze(-1)
        return Span(positions, start, reach, mask, causal=False)

    @staticmethod
    def ragged(starts: Tensor, length: int) -> Span:
        """Batch slot i continues at ``starts[i]``; every slot adds ``length`` tokens."""
        positions = starts.unsqueeze(-1) + torch.arange(length, device=starts.device)
        reach = int(starts.max()) + length
        keys = torch.arange(reach, device=starts.device)
        mask = (keys <= positions.unsqueeze(-1)).unsqueeze(1)
        return Span(positions, None, reach, mask, causal=False)

    def over(
        self, attend: Attend, queries: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """``attend`` for queries as the forward has them, here [B, T, ...].

        ``rows`` holds the parts of what is read, once for each group that attends together: here
        there is one.
        """
        return attend(queries, rows[0], self.mask, self.causal)


class Segment(NamedTuple):
    """``length`` new tokens of a request behind its first ``start``; ``pages`` as in its table."""

    pages: Sequence[int]
    start: int
    length: int


@dataclass(frozen=True)
class Reads:
    """Which rows a batch reads: the first ``length`` of one run, or gathered ones.

    ``rows`` [B, length] row numbers; ``run`` is the first row of a contiguous run (B = 1 only).
    """

    length: int
    rows: Tensor
    run: int | None
    _by_heads: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        page_size: int,
        spare: int,
        device: torch.device,
    ) -> Reads:
        """Read the first ``lengths[i]`` rows of table i; ``spare`` is the row that pads."""
        length = max(lengths)
        needed = -(-length // page_size)
        if len(tables) == 1:
            pages = tables[0][:needed]
            if list(pages) == list(range(pages[0], pages[0] + len(pages))) if pages else True:
                start = pages[0] * page_size if pages else 0
                rows = torch.arange(start, start + length, device=device).unsqueeze(0)
                return Reads(length, rows, start)
        padded = [[*table[:needed], *[0] * (needed - len(table))] for table in tables]
        first = torch.tensor(padded, device=device).unsqueeze(-1) * page_size
        rows = (first + torch.arange(page_size, device=device)).flatten(1)[:, :length]
        own = torch.tensor(lengths, device=device).unsqueeze(-1)
        rows = torch.where(torch.arange(length, device=device) < own, rows, spare)
        return Reads(length, rows, None)

    def index(self, heads: int) -> Tensor:
        """Row numbers in a tensor viewed as [rows * heads, width], ordered [B, heads, length]."""
        if heads not in self._by_heads:
            within = torch.arange(heads, device=self.rows.device).view(1, -1, 1)
            self._by_heads[heads] = (self.rows.unsqueeze(1) * heads + within).flatten()
        return self._by_heads[heads]


@dataclass(frozen=True)
class Group:
    """Neighbouring requests that attend together: queries padded to the most, keys to the furthest.

    ``positions`` and ``slots`` [tokens] of its part ``tokens`` of the flat row. Where lengths
    differ, ``padding`` [B, T] says which flat token stands where (the last one repeated), and
    ``kept`` [tokens] where each flat token is found again.
    """

    count: int
    tokens: slice
    positions: Tensor
    slots: Tensor
    reads: Reads
    mask: Tensor | None
    causal: bool
    padding: Tensor | None
    kept: Tensor | None

    @staticmethod
    def of(
        segments: Sequence[Segment], page_size: int, spare: int, device: torch.device, first: int
    ) -> Group:
        """``segments`` side by side, from flat token ``first`` on."""
        ends = [s.start + s.length for s in segments]
        reads = Reads.of([s.pages for s in segments], ends, page_size, spare, device)
        lengths = [s.length for s in segments]
        wide = max(lengths)
        starts = torch.tensor([s.start for s in segments], device=device).unsqueeze(-1)
        steps = torch.arange(wide, device=device)
        last = torch.tensor(lengths, device=device).unsqueeze(-1) - 1
        batch = starts + torch.minimum(steps, last)  # padding queries repeat the last token
        positions, slots = batch.flatten(), reads.rows.gather(1, batch).flatten()
        padding = kept = None
        if min(lengths) != wide:
            kept = (steps <= last).flatten().nonzero().squeeze(-1)
            offsets = first + torch.cumsum(last + 1, 0) - last - 1
            padding = offsets + torch.minimum(steps, last)
            positions, slots = positions[kept], slots[kept]
        mask, causal = _visible(batch, segments, reads.length, device)
        tokens = slice(first, first + sum(lengths))
        return Group(len(segments), tokens, positions, slots, reads, mask, causal, padding, kept)

    def spread(self, x: Tensor) -> Tensor:
        """Flat [1, total, ...] -> [B, T, ...]."""
        if self.padding is not None:
            return x[0][self.padding]
        flat = x[0] if x.shape[1] == len(self.positions) else x[0, self.tokens]
        return torch.unflatten(flat, 0, (self.count, -1))

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> the group's part of the flat row, [1, tokens, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept]).unsqueeze(0)


@dataclass(frozen=True)
class PagedSpan(Span):
    """New tokens of several requests in one flat row: ``positions`` [1, total].

    ``slots`` [total] are the rows they are written to, ``lengths`` the tokens per request. What
    attention sees is up to the ``groups``; ``mask`` and ``causal`` say nothing here.
    """

    slots: Tensor
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    @staticmethod
    def of(
        segments: Sequence[Segment], page_size: int, spare: int, device: torch.device
    ) -> PagedSpan:
        """The span of ``segments``, each with at least one token.

        Attention pads a group to its longest, so segments of like length should be neighbours.
        """
        groups, first = [], 0
        for low, high in groups_of(segments):
            groups.append(Group.of(segments[low:high], page_size, spare, device, first))
            first = groups[-1].tokens.stop
        positions = torch.cat([g.positions for g in groups])
        slots = torch.cat([g.slots for g in groups])
        reach, lengths = max(g.reads.length for g in groups), tuple(s.length for s in segments)
        return PagedSpan(
            positions.unsqueeze(0), None, reach, None, False, slots, lengths, tuple(groups)
        )

    def over(
        self, attend: Attend, queries: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """``attend`` for flat queries [1, total, ...] -> [1, total, ...]; rows of each group."""
        out = [
            group.flatten(attend([group.spread(q) for q in queries], own, group.mask, group.causal))
            for group, own in zip(self.groups, rows, strict=True)
        ]
        return out[0] if len(out) == 1 else torch.cat(out, 1)


@dataclass(frozen=True)
class BlockContext:
    """What the blocks of neighbouring requests read besides themselves: ``rows`` [B, N, row] of
    each draft layer; ``mask`` boolean, broadcastable to [B, 1, K, N + K], or None: all see all."""

    rows: Sequence[Tensor]
    mask: Tensor | None = None

    @staticmethod
    def padded(rows: Sequence[Tensor], starts: Tensor, width: int) -> BlockContext:
        """Of blocks of ``width`` tokens: the first ``starts`` [B] rows of each are its own."""
        longest = rows[0].shape[1]
        if len(starts) == 1:
            return BlockContext(rows)
        steps = torch.arange(longest + width, device=starts.device)
        seen = (steps < starts.unsqueeze(-1)) | (steps >= longest)
        return BlockContext(rows, seen[:, None, None])

    @property
    def count(self) -> int:
        """B: how many blocks these are."""
        return len(self.rows[0])


def over_contexts(
    attend: Callable[[Sequence[Tensor], Tensor, Tensor | None], Tensor],
    queries: Sequence[Tensor],
    own: Tensor,
    contexts: Sequence[BlockContext],
    layer: int,
) -> Tensor:
    """``attend(queries, rows, mask)`` for blocks that stand in the order of their ``contexts``.

    ``queries`` [R, ...] and rows ``own`` [R, K, row] of all blocks; what comes out is [R, ...].
    """
    out, first = [], 0
    for context in contexts:
        part = slice(first, first + context.count)
        rows = torch.cat([context.rows[layer].to(own.dtype), own[part]], dim=1)
        out.append(attend([q[part] for q in queries], rows, context.mask))
        first = part.stop
    return out[0] if len(out) == 1 else torch.cat(out)


def groups_of(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(from, to) of neighbours that attend together: a range is cut in two where that saves most,
    as long as it saves enough."""
    found, uncut = [], [(0, len(segments))]
    while uncut:
        low, high = uncut.pop()
        own = [(s.length, s.start + s.length) for s in segments[low:high]]
        before = _work(own)
        whole = before[-1]
        # No cut saves more than all padding there is.
        if whole - sum((queries + READ) * keys for queries, keys in own) >= SAVED:
            behind = _work(own[::-1])[::-1]
            least, at = min((before[i - 1] + behind[i], i) for i in range(1, len(own)))
            if whole - least >= SAVED:
                uncut += [(low + at, high), (low, low + at)]
                continue
        found.append((low, high))
    return found


def _work(requests: Sequence[tuple[int, int]]) -> list[int]:
    """Padded pairs of query and key of the first 1, 2, ... ``requests`` (queries, keys)."""
    most = zip(*(accumulate(column, max) for column in zip(*requests, strict=True)), strict=True)
    return [count * (wide + READ) * reach for count, (wide, reach) in enumerate(most, 1)]


def _visible(
    batch: Tensor, segments: Sequence[Segment], reach: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """(mask, causal): token at position p sees keys 0..p."""
    if len(segments) == 1 and segments[0].length == 1:
        return None, False
    if len(segments) == 1 and segments[0].start == 0:
        return None, True
    seen = torch.arange(reach, device=device) <= batch.unsqueeze(-1)
    return (seen[0] if len(segments) == 1 else seen.unsqueeze(1)), False
