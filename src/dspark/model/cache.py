"""Contiguous rows of a small batch: what capture and the answer generator stand on.

Rolling back rejected tokens is free: the caller starts the next span earlier and the rows are
overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.errors import DecodingError
from dspark.model.spans import Span
from dspark.model.states import BatchStates


class RowCache:
    """Rows of every layer: ``parts`` tensors [B, heads, capacity, width] per layer.

    GQA targets hold two parts (keys, values); MLA targets one part with a single head (latent).
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        parts: tuple[tuple[int, int], ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.batch = batch
        self.states: BatchStates | None = None
        self.layers = [
            [torch.zeros(batch, heads, capacity, width, dtype=dtype, device=device)
             for heads, width in parts]
            for _ in range(layers)
        ]  # fmt: skip

    def append(self, layer: int, span: Span, *new: Tensor) -> list[list[Tensor]]:
        """Write new rows [B, T, heads, width]; return all up to ``span.reach`` by heads, as the
        parts of the only group of :meth:`Span.over`."""
        if span.reach > self.capacity:
            raise DecodingError(
                expected=f"at most {self.capacity} cached tokens",
                found=f"a forward that reaches token {span.reach}",
                where="row cache",
                fix="Raise the capacity or clamp the request's length.",
            )
        out = []
        for rows, fresh in zip(self.layers[layer], new, strict=True):
            if span.start is not None:
                rows[:, :, span.start : span.reach] = fresh.transpose(1, 2)
            else:
                slots = torch.arange(self.batch, device=rows.device).unsqueeze(-1)
                rows[slots, :, span.positions] = fresh
            out.append(rows[:, :, : span.reach])
        return [out]

    def adopt(self, slots: Tensor, other: RowCache, length: int) -> None:
        """Copy the first ``length`` rows of ``other`` (one batch row per slot) into ``slots``."""
        if self.states is not None and other.states is not None:
            self.states.adopt(slots, other.states)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for rows, fresh in zip(mine, theirs, strict=True):
                rows[slots, :, :length] = fresh[:, :, :length]

    def seed(self, prefix: RowCache, length: int) -> None:
        """Start every batch row with the ``length`` rows of a prefix computed once (batch 1)."""
        if self.states is not None and prefix.states is not None:
            self.states.seed(prefix.states, length)
        for mine, theirs in zip(self.layers, prefix.layers, strict=True):
            for rows, shared in zip(mine, theirs, strict=True):
                rows[:, :, :length] = shared[:1, :, :length]

    def keep(self, slots: Tensor) -> None:
        """Shrink the batch to ``slots``, in that order."""
        self.batch = len(slots)
        if self.states is not None:
            self.states.select(slots)
        self.layers = [[rows[slots] for rows in parts] for parts in self.layers]


def shared_prefix(sequences: Sequence[Sequence[int]], least: int = 16) -> int:
    """Length of the prefix all token sequences share (leaving one token each); 0 if not worth it.

    Few-shot prompts and long system turns are the same for a whole workload: their rows are
    computed once. Never the whole of a sequence, whose last token must be run to be answered.
    """
    if len(sequences) < 2:
        return 0
    ordered = sorted(list(s) for s in sequences)
    low, high = ordered[0], ordered[-1]
    length = 0
    for a, b in zip(low, high, strict=False):
        if a != b:
            break
        length += 1
    length = min(length, min(len(s) for s in sequences) - 1)
    return length if length >= least else 0
