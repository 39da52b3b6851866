"""One request while it is being answered, as the scheduler sees it: ids, counts and pages.

A request's *tokens* are its prompt and what it has generated. The last generated token is the
anchor of the next block: its rows do not exist yet. A request that has generated nothing needs the
rows of its whole prompt, and its first token comes from the last of them; one that was preempted
needs the rows of everything but the anchor, and samples nothing when it gets them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dspark.decoding.acceptance import StepCount
from dspark.decoding.request import TokenKind
from dspark.engine.pages import BlockTable
from dspark.engine.snapshots import Snapshot

Status = Literal["waiting", "prefilling", "decoding", "finished"]


@dataclass(eq=False)
class Request:
    """``limit`` is how many tokens it may generate; ``sibling`` is the request whose prompt rows it
    waits to share (``n`` answers to one prompt are prefilled once).

    ``arrival`` orders requests; ``preemptions`` counts how often its rows were taken away;
    ``cached_rows`` is what the prefix cache gave when it was first admitted.
    """

    id: str
    prompt: list[int]
    limit: int
    arrival: int = 0
    sibling: Request | None = None
    output: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    status: Status = "waiting"
    preemptions: int = 0
    cached_rows: int | None = None

    @property
    def length(self) -> int:
        """Tokens known, the anchor included."""
        return len(self.prompt) + len(self.output)

    @property
    def wanted_rows(self) -> int:
        """Rows that must exist before it can decode."""
        return self.length - 1 if self.output else len(self.prompt)

    @property
    def room(self) -> int:
        """Tokens it may still generate."""
        return self.limit - len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` .. ``stop - 1`` of prompt and output."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - split) : stop - split]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a generated token under the target's own distribution, before rules and
    temperature; ``top`` are the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepResult:
    """What one step gave a request.

    ``tokens`` were emitted (and are not in the request's output yet), ``kinds`` and ``logprobs``
    go with them; ``rows`` leading rows are sound now; ``count`` is None when nothing was drafted;
    ``rejected`` are the drafted tokens that verification refused, in their order; ``snapshot`` is
    the state of a hybrid target behind some of the rows.
    """

    request: Request
    rows: int
    tokens: list[int]
    kinds: list[TokenKind]
    count: StepCount | None
    logprobs: list[TokenLogprob]
    rejected: tuple[int, ...] = ()
    snapshot: Snapshot | None = None
