"""Spans: the stretch of new tokens of one forward, where it starts and how far attention may look.

A span is computed once per forward and shared by all layers. :class:`Span` is a batch of equal
lengths over contiguous rows, :class:`PagedSpan` the tokens of many requests in one flat row over
pages. Where rows and states lie is none of its business (``dspark.model.cache``,
``dspark.model.paged``, ``dspark.model.states``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


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

    def spread(self, x: Tensor) -> Tensor:
        """Queries as attention wants them, [B, T, ...]: as they are here."""
        return x

    def flatten(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`spread`."""
        return x


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
class PagedSpan(Span):
    """New tokens of several requests in one flat row: ``positions`` [1, total].

    ``slots`` [total] are the rows they are written to, ``reads`` what attention sees. ``lengths``
    are the tokens per request; ``widest`` the largest. When they differ, ``padding`` [B, widest]
    says which flat token stands where (the last one repeated), and ``kept`` [total] where each flat
    token is found again.
    """

    slots: Tensor
    reads: Reads
    lengths: tuple[int, ...]
    padding: Tensor | None
    kept: Tensor | None

    @staticmethod
    def of(
        segments: Sequence[Segment], page_size: int, spare: int, device: torch.device
    ) -> PagedSpan:
        """The span of ``segments``, each with at least one token."""
        ends = [s.start + s.length for s in segments]
        reads = Reads.of([s.pages for s in segments], ends, page_size, spare, device)
        lengths = tuple(s.length for s in segments)
        wide = max(lengths)
        starts = torch.tensor([s.start for s in segments], device=device).unsqueeze(-1)
        steps = torch.arange(wide, device=device)
        last = torch.tensor(lengths, device=device).unsqueeze(-1) - 1
        batch = starts + torch.minimum(steps, last)  # padding queries repeat the last token
        padding = kept = None
        if min(lengths) == wide:
            positions, slots = batch.flatten(), reads.rows.gather(1, batch).flatten()
        else:
            real = (steps <= last).flatten()
            kept = real.nonzero().squeeze(-1)
            offsets = torch.cumsum(last + 1, 0) - last - 1
            padding = offsets + torch.minimum(steps, last)
            positions, slots = batch.flatten()[kept], reads.rows.gather(1, batch).flatten()[kept]
        mask, causal = _visible(batch, segments, reads.length, device)
        return PagedSpan(
            positions.unsqueeze(0), None, reads.length, mask, causal, slots, reads, lengths,
            padding, kept,
        )  # fmt: skip

    def spread(self, x: Tensor) -> Tensor:
        """Flat [1, total, ...] -> [B, widest, ...]."""
        if self.padding is not None:
            return x[0][self.padding]
        return torch.unflatten(x[0], 0, (len(self.lengths), -1))

    def flatten(self, x: Tensor) -> Tensor:
        """[B, widest, ...] -> flat [1, total, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept]).unsqueeze(0)


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
