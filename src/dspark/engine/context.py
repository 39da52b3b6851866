"""The draft's context rows: made from the target's states, at once or when they are next needed.

A request that drafts gets the rows of its new tokens in the same step. While it is bypassed nobody
reads its rows: the states are kept instead, and become rows together when it drafts again, when it
ends, or when there are ``MOST_LATE`` of them (``ALL_LATE`` over all requests: at the size of
Kimi-K3 that is 75 MB of states). One pass over the draft's context weights then serves many tokens.
For one token a step it was 3 % of a step of a 135M target at batch 1, paid by exactly those
requests whose draft is of no use.

Rows that are late are not sound (``BlockTable.draft_rows``): no page is shared before they are
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.engine.drafter import Drafter
from dspark.engine.request import Request
from dspark.model.paged import PagedRows

MOST_LATE, ALL_LATE = 64, 1024


@dataclass
class _Late:
    """States [1, L, H] of tokens from position ``start`` on."""

    start: int
    taps: list[Tensor] = field(default_factory=list)


class ContextRows:
    """Writes rows of ``drafter`` (None: nothing is late or written) into ``rows``, whose layers
    from ``first_layer`` on are the draft's.

    ``wait`` False: never late. Snapshots of a hybrid target need complete pages at once.
    """

    def __init__(
        self, drafter: Drafter | None, rows: PagedRows, first_layer: int, *, wait: bool
    ) -> None:
        self.drafter, self.rows, self.first_layer = drafter, rows, first_layer
        self.waits = wait and drafter is not None
        self._late: dict[Request, _Late] = {}

    def write(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Rows of tokens with states [M, L, H] at ``positions`` [M] into ``slots`` [M]."""
        assert self.drafter is not None, "without a draft there are no rows"
        for layer, rows in enumerate(self.drafter.context_rows(taps, positions)):
            self.rows.write(self.first_layer + layer, slots, rows)

    def keep(self, request: Request, position: int, taps: Tensor) -> None:
        """The token at ``position``, the one behind all that are known, with states [1, L, H]."""
        late = self._late.setdefault(request, _Late(position))
        assert position == late.start + len(late.taps), "a token between was left out"
        # A copy: the states of everybody else's tokens in this step may go.
        late.taps.append(taps.clone())

    def missing(self, request: Request) -> int:
        """How many of its rows, the last ones, are late."""
        late = self._late.get(request)
        return 0 if late is None else len(late.taps)

    def due(self, requests: Sequence[Request]) -> list[Request]:
        """Those of ``requests`` whose rows may wait no longer."""
        full = sum(len(late.taps) for late in self._late.values()) >= ALL_LATE
        return [r for r in requests if self.missing(r) >= (1 if full else MOST_LATE)]

    @torch.inference_mode()
    def catch_up(self, requests: Iterable[Request]) -> bool:
        """Write all late rows of ``requests``; False if there were none."""
        due = [(r, late) for r in requests if (late := self._late.pop(r, None)) is not None]
        if not due:
            return False
        size = self.rows.page_size
        at = [range(late.start, late.start + len(late.taps)) for _, late in due]
        # By the table as it is now: a page may have been copied since.
        slots = [
            r.table.pages[p // size] * size + p % size
            for (r, _), positions in zip(due, at, strict=True)
            for p in positions
        ]
        taps = torch.cat([t for _, late in due for t in late.taps])
        positions = torch.tensor([p for span in at for p in span], device=taps.device)
        self.write(taps, positions, torch.tensor(slots, device=taps.device))
        return True

    def drop(self, request: Request) -> None:
        """Its pages are gone."""
        self._late.pop(request, None)
