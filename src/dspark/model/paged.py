"""Cached rows in pages: the tensors behind one block table per request.

Every layer, of the target and of the draft alike, stores its rows in a tensor
[pages * page_size + 1, heads, width] and reads them through the same page ids: a page id stands for
one page of every layer. GQA targets keep two parts a layer (keys, values), MLA targets and drafts
one latent part, so the draft's layers are just more layers of the pool.

One forward runs tokens of many requests as one flat row of tokens, without padding: linears see
exactly the tokens there are, however long each request's block is. Only attention needs a batch
[B, T]; :class:`PagedSpan` spreads queries into it and flattens what comes out. Keys are gathered
once per layer with an index that all layers share. A lone request whose pages lie in one run is
read as a view, without a copy.

The spare last row of every tensor stays zero; positions behind a request's own reach read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dspark.model.cache import Span

if TYPE_CHECKING:
    from dspark.model.states import SlotStates


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
        if len(self.lengths) == 1:
            return x
        if self.padding is not None:
            return x[0][self.padding]
        return torch.unflatten(x[0], 0, (len(self.lengths), -1))

    def flatten(self, x: Tensor) -> Tensor:
        """[B, widest, ...] -> flat [1, total, ...]."""
        if len(self.lengths) == 1:
            return x
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


class PagedRows:
    """The row tensors of all layers. ``layers`` gives the parts (heads, width, dtype) of each.

    Parts of one layer are appended and read together, by :meth:`append` from inside a target's
    forward, or by :meth:`write` and :meth:`read` for the draft's layers.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[int, int, torch.dtype]]],
        pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.page_size, self.spare = page_size, pages * page_size
        self.states: SlotStates | None = None
        # Not zeroed as a whole: memory is only taken when rows are written.
        self.layers = [
            [torch.empty(self.spare + 1, heads, width, dtype=dtype, device=device)
             for heads, width, dtype in parts]
            for parts in layers
        ]  # fmt: skip
        for rows in (rows for parts in self.layers for rows in parts):
            rows[self.spare] = 0

    def append(self, layer: int, span: Span, *new: Tensor) -> list[Tensor]:
        """Write new rows [1, total, heads, width]; return what is read [B, heads, N, width]."""
        assert isinstance(span, PagedSpan)
        for rows, fresh in zip(self.layers[layer], new, strict=True):
            rows.index_copy_(0, span.slots, fresh[0].to(rows.dtype))
        return self.read(layer, span.reads)

    def read(self, layer: int, reads: Reads) -> list[Tensor]:
        """The parts of a layer, [B, heads, length, width] each."""
        out = []
        for rows in self.layers[layer]:
            _, heads, width = rows.shape
            row = heads * width
            if reads.run is not None:
                # A slice and its transposition in one operation: this runs 60 times a token.
                shape, strides = (1, heads, reads.length, width), (row, width, row, 1)
                out.append(rows.as_strided(shape, strides, reads.run * row))
                continue
            found = rows.view(-1, width).index_select(0, reads.index(heads))
            out.append(found.view(-1, heads, reads.length, width))
        return out

    def write(self, layer: int, slots: Tensor, new: Tensor) -> None:
        """Write rows [total, width] of a layer with one part of one head."""
        (rows,) = self.layers[layer]
        rows.index_copy_(0, slots, new.unsqueeze(1).to(rows.dtype))

    def copy(self, source: int, to: int) -> None:
        """Copy a page in every layer."""
        size = self.page_size
        for rows in (rows for parts in self.layers for rows in parts):
            rows[to * size : (to + 1) * size] = rows[source * size : (source + 1) * size]
