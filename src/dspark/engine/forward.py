"""Running the target for a batch of requests, whatever kind of target it is.

Our own decoder takes tokens of all requests in one flat forward over the pages. The transformers
adapter keeps a cache per sequence and runs them one after the other; pages still count its rows, so
scheduling is the same, but nothing is shared between requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dspark.engine.request import Request
from dspark.engine.snapshots import Snapshot, Snapshots
from dspark.errors import DecodingError
from dspark.model.paged import PagedRows
from dspark.model.spans import PagedSpan, Span
from dspark.model.states import SlotStates
from dspark.model.target import Target, TargetOutput


class Part(NamedTuple):
    """``tokens`` of a request behind its first ``start``."""

    request: Request
    tokens: list[int]
    start: int


class TargetRunner(Protocol):
    """One forward over parts of several requests; outputs are flat, in the order of the parts."""

    def run(self, parts: Sequence[Part], span: PagedSpan) -> TargetOutput:
        """``final`` [total, H] and ``taps`` [total, L, H]."""
        ...

    def drop(self, request: Request) -> None:
        """The rows of this request are gone."""
        ...


class FlatRunner:
    """All parts in one forward over ``rows``."""

    def __init__(self, target: Target, rows: PagedRows) -> None:
        self.target, self.rows = target, rows

    def run(self, parts: Sequence[Part], span: PagedSpan) -> TargetOutput:
        tokens = [token for part in parts for token in part.tokens]
        ids = torch.tensor([tokens], device=self.target.device)
        out = self.target.forward(ids, span, self.rows)
        return TargetOutput(out.final[0], out.taps[0])

    def drop(self, request: Request) -> None:
        """Pages are all there is."""


class HybridRunner(FlatRunner):
    """As :class:`FlatRunner`, with a slot of ``states`` for every request that has rows.

    :meth:`commit` must follow every forward whose tokens stay; a forward alone changes no state.
    """

    def __init__(
        self, target: Target, rows: PagedRows, states: SlotStates, requests: int, page_size: int,
        snapshots: Snapshots | None,
    ) -> None:  # fmt: skip
        super().__init__(target, rows)
        rows.states = self.states = states
        self.page_size, self.snapshots = page_size, snapshots
        self._free = list(range(requests - 1, -1, -1))
        self._slots: dict[Request, int] = {}
        self._at: dict[Request, int] = {}

    def restore(self, request: Request, source: int, rows: int) -> None:
        """``request`` continues behind its first ``rows`` tokens; their state is in ``source``."""
        self.states.copy(source, self._open(request))
        self._at[request] = rows

    def run(self, parts: Sequence[Part], span: PagedSpan) -> TargetOutput:
        for request, _, start in parts:
            if start == 0:
                self.states.clear(self._open(request))
                self._at[request] = 0
            if self._at.get(request) != start:
                raise DecodingError(
                    expected=f"tokens behind {self._at.get(request)}, where the state is",
                    found=f"tokens behind {start}",
                    where=f"recurrent state of request {request.id}",
                    fix="This is a bug of the engine: report it.",
                )
        self.states.enter([self._slots[part.request] for part in parts], span.lengths)
        return super().run(parts, span)

    def begin(self) -> None:
        """A step begins: states that a failed one was about to keep are lost."""
        if self.snapshots is not None:
            self.snapshots.reclaim()

    def commit(
        self, parts: Sequence[Part], counts: Sequence[int], *, keep: bool = True
    ) -> list[Snapshot | None]:
        """The first ``counts[i]`` tokens of each part of the last forward stay.

        Unless ``keep`` is off, the states at page boundaries that they crossed are kept too.
        """
        made: list[Snapshot | None] = [None] * len(parts)
        if keep and self.snapshots is not None:
            made = [self._boundary(p, c) for p, c in zip(parts, counts, strict=True)]
        saved = [
            (index, snapshot.rows - parts[index].start, snapshot.slot)
            for index, snapshot in enumerate(made)
            if snapshot is not None
        ]
        self.states.commit(counts, saved)
        for part, count in zip(parts, counts, strict=True):
            self._at[part.request] += count
        return made

    def drop(self, request: Request) -> None:
        if (slot := self._slots.pop(request, None)) is not None:
            self._free.append(slot)
            del self._at[request]

    def _open(self, request: Request) -> int:
        if request not in self._slots:
            self._slots[request] = self._free.pop()
            self._at[request] = 0
        return self._slots[request]

    def _boundary(self, part: Part, count: int) -> Snapshot | None:
        """The last page boundary that these tokens crossed, with a slot for its state."""
        assert self.snapshots is not None
        request, reach = part.request, part.start + count
        # A whole prompt's own state helps nobody: its last token must be run to be answered.
        ends = reach == request.wanted_rows and not request.output
        rows = (reach - ends) // self.page_size * self.page_size
        if rows <= part.start or len(part.tokens) - (rows - part.start) > self.snapshots.tail:
            return None
        slot = self.snapshots.take()
        if slot is None:
            return None
        # A prompt's own last boundary is kept, also where it is a chunk's end.
        last = (request.wanted_rows - 1) // self.page_size * self.page_size
        moves = bool(request.output) or rows not in {last, request.table.branch}
        return Snapshot(rows, slot, rolling=moves)


class SingleRunner:
    """One forward per part, with a cache per request."""

    def __init__(self, target: Target, capacity: int) -> None:
        self.target, self.capacity = target, capacity
        self._caches: dict[Request, Any] = {}

    def run(self, parts: Sequence[Part], span: PagedSpan) -> TargetOutput:
        finals: list[Tensor] = []
        taps: list[Tensor] = []
        for request, tokens, start in parts:
            if request not in self._caches:
                self._caches[request] = self.target.new_cache(1, self.capacity)
            ids = torch.tensor([tokens], device=self.target.device)
            at = Span.at(start, len(tokens), 1, ids.device)
            out = self.target.forward(ids, at, self._caches[request])
            finals.append(out.final[0])
            taps.append(out.taps[0])
        return TargetOutput(torch.cat(finals), torch.cat(taps))

    def drop(self, request: Request) -> None:
        self._caches.pop(request, None)
