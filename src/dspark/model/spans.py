"""Spans: the stretch of new tokens of one forward, where it starts and how far attention may look.

A span is computed once per forward and shared by all layers. :class:`Span` is a batch of equal
lengths over contiguous rows, :class:`PagedSpan` the tokens of many requests in one flat row over
pages. Where rows and states lie is none of its business (``dspark.model.cache``,
``dspark.model.paged``, ``dspark.model.states``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None, bool], Tensor]
"""``(queries, rows, mask, causal)`` -> [B, T, ...]: queries [B, T, ...] over rows [B, ..].

``mask`` and ``causal`` are a :class:`Span`'s."""

SAVED = 16  # padding queries that are worth a group of their own, at least


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

    def over(self, attend: Attend, queries: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """``attend`` for queries as the forward has them, here [B, T, ...]; rows [B, ...]."""
        return attend(queries, rows, self.mask, self.causal)


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
    """Neighbouring requests whose queries are padded to one length and attend together.

    ``requests`` and ``tokens`` are where they lie in the batch and in the flat row. Where lengths
    differ, ``padding`` [B, T] says which flat token stands where (the last one repeated), and
    ``kept`` [tokens] where each flat token is found again.
    """

    requests: slice
    tokens: slice
    mask: Tensor | None
    padding: Tensor | None
    kept: Tensor | None

    def spread(self, x: Tensor) -> Tensor:
        """Flat [1, total, ...] -> [B, T, ...]."""
        if self.padding is not None:
            return x[0][self.padding]
        count = self.requests.stop - self.requests.start
        flat = x[0] if self.tokens == slice(None) else x[0, self.tokens]
        return torch.unflatten(flat, 0, (count, -1))

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> the group's part of the flat row, [1, tokens, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept]).unsqueeze(0)


@dataclass(frozen=True)
class PagedSpan(Span):
    """New tokens of several requests in one flat row: ``positions`` [1, total].

    ``slots`` [total] are the rows they are written to, ``reads`` what attention sees. ``lengths``
    are the tokens per request. ``mask`` is that of the only group, None if there are more.
    """

    slots: Tensor
    reads: Reads
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    @staticmethod
    def of(
        segments: Sequence[Segment], page_size: int, spare: int, device: torch.device
    ) -> PagedSpan:
        """The span of ``segments``, each with at least one token.

        Attention pads queries, so segments of like length should be neighbours.
        """
        ends = [s.start + s.length for s in segments]
        reads = Reads.of([s.pages for s in segments], ends, page_size, spare, device)
        lengths = tuple(s.length for s in segments)
        wide = max(lengths)
        starts = torch.tensor([s.start for s in segments], device=device).unsqueeze(-1)
        last = torch.tensor(lengths, device=device).unsqueeze(-1) - 1
        steps = torch.arange(wide, device=device)
        batch = starts + torch.minimum(steps, last)  # padding queries repeat the last token
        positions, slots = batch.flatten(), reads.rows.gather(1, batch).flatten()
        if min(lengths) != wide:
            real = (steps <= last).flatten()
            positions, slots = positions[real], slots[real]
        if len(segments) == 1:
            seen, causal = _alone(segments[0], batch, reads.length)
            groups = [Group(slice(0, 1), slice(None), seen, None, None)]
        else:
            causal = False
            keys = torch.arange(reads.length, device=device)
            mask = (keys <= batch.unsqueeze(-1)).unsqueeze(1)
            groups = list(_groups(lengths, last, mask))
        only = groups[0].mask if len(groups) == 1 else None
        return PagedSpan(
            positions.unsqueeze(0), None, reads.length, only, causal, slots, reads, lengths,
            tuple(groups),
        )  # fmt: skip

    def over(self, attend: Attend, queries: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """``attend`` for flat queries [1, total, ...] -> [1, total, ...]; rows [B, ...]."""
        out = []
        for group in self.groups:
            own = rows if len(self.groups) == 1 else [r[group.requests] for r in rows]
            spread = [group.spread(q) for q in queries]
            out.append(group.flatten(attend(spread, own, group.mask, self.causal)))
        return out[0] if len(out) == 1 else torch.cat(out, 1)


def _groups(lengths: Sequence[int], last: Tensor, mask: Tensor) -> Iterator[Group]:
    """One group, or two where that saves much padding; ``last`` [B, 1] is ``lengths`` less one,
    ``mask`` [B, 1, T, N] that of all."""
    count, ends = len(lengths), list(accumulate(lengths, initial=0))
    before = list(accumulate(lengths, max))
    behind = list(accumulate(reversed(lengths), max))[::-1]
    cut = min(range(1, count), key=lambda i: i * before[i - 1] + (count - i) * behind[i])
    saved = count * max(lengths) - cut * before[cut - 1] - (count - cut) * behind[cut]
    for low, high in ((0, cut), (cut, count)) if saved >= SAVED else ((0, count),):
        own, wide = last[low:high], max(lengths[low:high])
        padding = kept = None
        if min(lengths[low:high]) != wide:
            steps = torch.arange(wide, device=last.device)
            kept = (steps <= own).flatten().nonzero().squeeze(-1)
            offsets = torch.cumsum(own + 1, 0) - own - 1 + ends[low]
            padding = offsets + torch.minimum(steps, own)
        tokens = slice(ends[low], ends[high])
        yield Group(slice(low, high), tokens, mask[low:high, :, :wide], padding, kept)


def _alone(segment: Segment, at: Tensor, reach: int) -> tuple[Tensor | None, bool]:
    """(mask, causal) of one request with tokens ``at`` [1, T]: each sees keys up to itself."""
    if segment.length == 1:
        return None, False
    if segment.start == 0:
        return None, True
    return torch.arange(reach, device=at.device) <= at[0].unsqueeze(-1), False
