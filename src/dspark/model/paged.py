"""Cached rows in pages: the tensors behind one block table per request.

Every layer, of the target and of the draft alike, stores its rows in a tensor
[pages * page_size + 1, heads, width] and reads them through the same page ids: a page id stands for
one page of every layer. GQA targets keep two parts a layer (keys, values), MLA targets and drafts
one latent part, so the draft's layers are just more layers of the pool.

One forward runs tokens of many requests as one flat row of tokens, without padding: linears see
exactly the tokens there are, however long each request's block is. Only attention needs a batch
[B, T]; a :class:`~dspark.model.spans.Group` spreads queries into it and flattens what comes out.
Keys are gathered once per layer and group with an index that all layers share. A lone request whose
pages lie in one run is read as a view, without a copy.

The spare last row of every tensor stays zero; positions behind a request's own reach read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.model.spans import PagedSpan, Reads, Span
from dspark.model.states import SlotStates


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

    def append(self, layer: int, span: Span, *new: Tensor) -> list[list[Tensor]]:
        """Write new rows [1, total, heads, width]; return what each group of requests reads,
        [B, heads, N, width] a part."""
        assert isinstance(span, PagedSpan)
        for rows, fresh in zip(self.layers[layer], new, strict=True):
            rows.index_copy_(0, span.slots, fresh[0].to(rows.dtype))
        return [self.read(layer, group.reads) for group in span.groups]

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
