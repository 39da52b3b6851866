"""Recurrent and convolution states of hybrid targets, and how verified tokens become part of them.

Rows of attention can be written ahead and simply not read after a rejection. A state cannot: it
forgets what it was. So a forward only *reads* states. What it would add to them (keys, corrections
and decays of its last block, and the convolution's inputs) stays pending until :meth:`commit` says
how many of each request's tokens are kept. The cost is one product per head instead of a copy of
the state per drafted token; see ``docs/architecture.md``.

New tokens are aligned at the right end of a batch, so that the last block of every request ends in
the last column, whatever its length; columns in front are padding that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config.hybrid import LinearConfig
from dspark.errors import DecodingError
from dspark.model.delta import Updates, state_after
from dspark.model.spans import PagedSpan, Span


class StateDims(NamedTuple):
    """Sizes of a target's states; ``inputs`` is the dtype of the convolution's."""

    layers: int
    heads: int
    head_dim: int
    kernel: int
    inputs: torch.dtype

    @staticmethod
    def of(linear: LinearConfig, dtype: torch.dtype) -> StateDims:
        return StateDims(len(linear.layers), linear.heads, linear.head_dim, linear.kernel, dtype)

    @property
    def channels(self) -> int:
        return 3 * self.heads * self.head_dim

    @property
    def bytes(self) -> int:
        """Of one request's states in all layers."""
        matrices = self.heads * self.head_dim**2 * torch.float32.itemsize
        inputs = (self.kernel - 1) * self.channels * self.inputs.itemsize
        return self.layers * (matrices + inputs)

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Zero states of ``count`` requests: [L, count, H, d, d] and [L, count, K - 1, C]."""
        matrices = torch.zeros(
            self.layers, count, self.heads, self.head_dim, self.head_dim, device=device
        )
        inputs = torch.zeros(
            self.layers, count, self.kernel - 1, self.channels, dtype=self.inputs, device=device
        )
        return matrices, inputs


class Layout:
    """Where the new tokens of a forward stand: aligned right in [B, ``widest``].

    Without ``lengths`` the tokens are a batch [B, T] already.
    """

    def __init__(self, lengths: Sequence[int] | None, device: torch.device) -> None:
        self.lengths = lengths
        self.real: Tensor | None = None
        if lengths is None or min(lengths) == max(lengths):
            return
        wide = max(lengths)
        own = torch.tensor(lengths, device=device).unsqueeze(-1)
        ends = own.cumsum(0)
        self.real = torch.arange(wide, device=device) >= wide - own
        self._from = (ends - wide + torch.arange(wide, device=device)).clamp_min(0)
        self._back = self.real.flatten().nonzero().squeeze(-1)

    def spread(self, x: Tensor) -> Tensor:
        """Flat [1, total, ...] -> [B, widest, ...]; padding holds other tokens' values."""
        if self.lengths is None:
            return x
        if self.real is None:
            return torch.unflatten(x[0], 0, (len(self.lengths), -1))
        return x[0][self._from]

    def behind(self, past: Tensor, x: Tensor) -> Tensor:
        """``past`` [B, K - 1, C] right in front of each request's tokens -> [B, K - 1 + T, C]."""
        new = self.spread(x)
        whole = torch.cat([past, new], 1)
        if self.real is not None:
            count, wide = past.shape[1], new.shape[1]
            own = self.real.sum(-1, keepdim=True)
            steps = torch.arange(count, device=x.device)
            whole.scatter_(
                1, (wide - own + steps).unsqueeze(-1).expand(-1, -1, whole.shape[-1]), past
            )
        return whole

    def quiet(self, x: Tensor) -> Tensor:
        """``x`` [B, T, ...] with zeros at padding."""
        if self.real is None:
            return x
        return x * self.real.view(*self.real.shape, *[1] * (x.dim() - 2))

    def flatten(self, x: Tensor) -> Tensor:
        """[B, widest, ...] -> as the tokens came."""
        if self.lengths is None:
            return x
        flat = x.flatten(0, 1)
        return (flat if self.real is None else flat[self._back]).unsqueeze(0)


class StepStates(Protocol):
    """States as one forward sees them."""

    layout: Layout

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """Matrices [B, H, d, d] and past inputs [B, K - 1, C] of recurrent layer ``layer``."""
        ...

    def keep(self, layer: int, start: Tensor, updates: Updates, inputs: Tensor) -> None:
        """``updates`` begin at ``start``; ``inputs`` [B, K - 1 + T, C] with the past in front."""
        ...


class States(Protocol):
    """The recurrent states beside the rows of a hybrid target."""

    def begin(self, span: Span) -> StepStates:
        """As the forward of ``span`` sees them."""
        ...


class Rows(Protocol):
    """Where a target's forward leaves its rows and finds all it may see; ``states`` is None but
    for hybrid targets."""

    @property
    def states(self) -> States | None: ...

    def append(self, layer: int, span: Span, *new: Tensor) -> list[list[Tensor]]:
        """Write new rows [B, T, heads, width]; return all that queries may see, for each group of
        requests (:meth:`Span.over`) the parts [B, heads, N, width]."""
        ...


class HybridCache(NamedTuple):
    """What the layers of one forward of a hybrid target see."""

    rows: Rows | None
    states: StepStates

    def append(self, layer: int, span: Span, *new: Tensor) -> list[list[Tensor]]:
        """As :class:`Rows`; without rows a sequence sees only itself."""
        if self.rows is None:
            return [[rows.transpose(1, 2) for rows in new]]
        return self.rows.append(layer, span, *new)


class FreshStates:
    """Whole sequences without a cache: zero states, nothing is kept."""

    def __init__(self, dims: StateDims, batch: int, device: torch.device) -> None:
        self.layout = Layout(None, device)
        matrices, inputs = dims._replace(layers=1).empty(batch, device)
        self._zero = matrices[0], inputs[0]

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._zero

    def keep(self, layer: int, start: Tensor, updates: Updates, inputs: Tensor) -> None:
        """Nobody asks again."""


class BatchStates:
    """States beside a :class:`~dspark.model.cache.RowCache`: every token is kept at once."""

    def __init__(self, dims: StateDims, batch: int, device: torch.device) -> None:
        self.layout = Layout(None, device)
        self.matrices, self.inputs = dims.empty(batch, device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self, span: Span) -> BatchStates:
        """Check that ``span`` continues where the states are; from 0 they start afresh.

        Raises:
            DecodingError: it does not.
        """
        starts = span.positions[:, 0]
        fresh = starts == 0
        if span.start == 0 or bool(fresh.all()):
            self.matrices.zero_()
            self.inputs.zero_()
        elif bool((wrong := (starts != self.positions) & ~fresh).any()):
            row = int(wrong.nonzero()[0])
            raise DecodingError(
                expected=f"tokens that continue at {int(self.positions[row])}, where the recurrent "
                "states are",
                found=f"tokens at {int(starts[row])}",
                where=f"row cache of a hybrid target, sequence {row}",
                fix="Run tokens in order; a recurrent state cannot go back.",
            )
        elif bool(fresh.any()):
            self.matrices[:, fresh] = 0
            self.inputs[:, fresh] = 0
        self.positions = starts + span.positions.shape[1]
        return self

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.matrices[layer], self.inputs[layer]

    def keep(self, layer: int, start: Tensor, updates: Updates, inputs: Tensor) -> None:
        past = self.inputs.shape[2]
        self.matrices[layer] = state_after(start, updates, None)
        self.inputs[layer] = inputs[:, inputs.shape[1] - past :]

    def seed(self, prefix: BatchStates, length: int) -> None:
        """Start every batch row at a prefix that was computed once (batch 1)."""
        assert prefix.positions.tolist() == [length], (
            "a state exists only at the end of what was run"
        )
        self.matrices.copy_(prefix.matrices.expand_as(self.matrices))
        self.inputs.copy_(prefix.inputs.expand_as(self.inputs))
        self.positions.fill_(length)

    def adopt(self, slots: Tensor, other: BatchStates) -> None:
        """Take the states of ``other`` (one sequence per slot) into ``slots``."""
        self.matrices[:, slots], self.inputs[:, slots] = other.matrices, other.inputs
        self.positions[slots] = other.positions

    def select(self, slots: Tensor) -> None:
        """Shrink the batch to ``slots``, in that order."""
        self.matrices, self.inputs = self.matrices[:, slots], self.inputs[:, slots]
        self.positions = self.positions[slots]


class _Pending(NamedTuple):
    start: Tensor
    updates: Updates
    inputs: Tensor


class SlotStates:
    """States of many requests in numbered slots; a forward's tokens are kept by :meth:`commit`."""

    def __init__(self, dims: StateDims, slots: int, device: torch.device) -> None:
        self.dims = dims
        self.matrices, self.inputs = dims.empty(slots, device)
        self.layout = Layout(None, device)
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._pending: list[_Pending] = []

    def enter(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """The next forward runs ``lengths[i]`` tokens of the request in ``slots[i]``."""
        device = self.matrices.device
        self._slots = torch.tensor(slots, device=device)
        self.layout = Layout(tuple(lengths), device)
        self._pending = []

    def begin(self, span: Span) -> SlotStates:
        """Called by the forward that :meth:`enter` announced."""
        assert isinstance(span, PagedSpan)
        assert self.layout.lengths == span.lengths, "enter() was not called for this forward"
        return self

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.matrices[layer][self._slots], self.inputs[layer][self._slots]

    def keep(self, layer: int, start: Tensor, updates: Updates, inputs: Tensor) -> None:
        self._pending.append(_Pending(start, updates, inputs))

    def commit(self, counts: Sequence[int], saved: Sequence[tuple[int, int, int]] = ()) -> None:
        """Keep ``counts[i]`` tokens of request i of the last forward, in all layers.

        ``saved`` are further (request, count, slot): the state behind ``count`` tokens is written
        to ``slot`` as well. No count may leave out more than the ``BLOCK`` tokens that are solved
        at once.
        """
        assert len(self._pending) == self.dims.layers
        lengths = self.layout.lengths
        assert lengths is not None
        wide = max(lengths)
        width = self._pending[0].updates.key.shape[-2]
        device = self.matrices.device
        rows = [*range(len(counts)), *(row for row, _, _ in saved)]
        kept = [*counts, *(count for _, count, _ in saved)]
        # Columns of the last block, padding included, which changes nothing.
        columns = [width - lengths[row] + count for row, count in zip(rows, kept, strict=True)]
        assert all(0 <= c <= width for c in columns), "more tokens taken back than a block holds"
        to = torch.cat([self._slots, torch.tensor([s for *_, s in saved], dtype=torch.int64)
                        .to(device)])  # fmt: skip
        at = torch.tensor(columns, device=device)
        index = torch.tensor(rows, device=device) if saved else None
        past = self.dims.kernel - 1
        first = torch.tensor([wide - lengths[r] + c for r, c in zip(rows, kept, strict=True)])
        window = first.to(device).unsqueeze(-1) + torch.arange(past, device=device)
        for layer, (start, updates, inputs) in enumerate(self._pending):
            if index is not None:
                start, inputs = start[index], inputs[index]
                updates = Updates(*(x[index] for x in updates))
            self.matrices[layer].index_copy_(0, to, state_after(start, updates, at))
            tail = inputs.gather(1, window.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
            self.inputs[layer].index_copy_(0, to, tail)
        self._pending = []

    def clear(self, slot: int) -> None:
        """The state in front of a text's first token."""
        self.matrices[:, slot] = 0
        self.inputs[:, slot] = 0

    def copy(self, source: int, to: int) -> None:
        """Copy all layers' states from one slot to another."""
        self.matrices[:, to] = self.matrices[:, source]
        self.inputs[:, to] = self.inputs[:, source]


def short_convolution(inputs: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution with SiLU: ``inputs`` [B, K - 1 + T, C], ``weight`` [C, K] ->
    [B, T, C]."""
    kernel = weight.shape[1]
    length = inputs.shape[1] - kernel + 1
    out = inputs[:, :length] * weight[:, 0]
    for tap in range(1, kernel):
        out = out + inputs[:, tap : tap + length] * weight[:, tap]
    return F.silu(out)
