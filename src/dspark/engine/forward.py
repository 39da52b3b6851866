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
from dspark.model.cache import Span
from dspark.model.paged import PagedRows, PagedSpan
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
