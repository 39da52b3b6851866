"""Who runs next, and in which pages: continuous batching without a single tensor.

Every step has two parts. *Decoding* requests verify one block each: ``lookahead`` slots for drafted
tokens are reserved BEFORE anything is drafted (a draft without slots of its own would write into a
neighbour's page). *Prefilling* requests share what is left of the step's token budget in chunks, so
that a long prompt never stops the others for long.

When pages run out, the newest request gives its pages back and is computed again later
(preemption by recompute): rows are lost, what was generated and the position in its random streams
are not, so its text does not change. The oldest request always advances, and
:meth:`Scheduler.add` refuses what could not fit alone: so every request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dspark.engine.pages import PageCopy, PagePool
from dspark.engine.request import Request
from dspark.errors import DecodingError


@dataclass(frozen=True)
class Chunk:
    """Rows ``start`` .. ``start + count - 1`` of a request are to be computed."""

    request: Request
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the request has all the rows it wants after this chunk."""
        return self.start + self.count == self.request.wanted_rows


@dataclass
class Plan:
    """One step: make ``copies``, then run ``prefill`` chunks and one block per ``decode``.

    ``preempted`` lost their rows in this step; whoever keeps rows elsewhere must drop them too.
    ``restored`` begin behind cached rows whose state lies in the named slot (hybrid targets).
    """

    copies: list[PageCopy] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    restored: list[tuple[Request, int]] = field(default_factory=list)


class Scheduler:
    """Decides steps over one :class:`PagePool`.

    Args:
        pool: pages.
        max_requests: requests that hold pages at once.
        token_budget: tokens of one step, over all requests.
        lookahead: drafted tokens per block (0 without a draft).
        max_length: tokens of one request at most, prompt included.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_requests: int,
        token_budget: int,
        lookahead: int,
        max_length: int,
    ) -> None:
        least = max_requests * (lookahead + 1)
        if max_requests < 1 or token_budget < least:
            raise DecodingError(
                expected=f"max_requests >= 1 and a token budget of at least {least}: one block of "
                f"{lookahead + 1} tokens for each of {max_requests} requests",
                found=f"max_requests {max_requests}, token budget {token_budget}",
                where="engine options",
                fix="Raise max_batch_tokens or lower max_requests.",
            )
        self.pool = pool
        self.max_requests, self.token_budget = max_requests, token_budget
        self.lookahead = lookahead
        self.max_length = min(max_length, pool.count * pool.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DecodingError: a prompt that is empty or leaves no room for one token.
        """
        if not 0 < len(request.prompt) < self.max_length:
            raise DecodingError(
                expected=f"a prompt of 1 to {self.max_length - 1} tokens",
                found=f"{len(request.prompt)} tokens",
                where=f"prompt of request {request.id}",
                fix="Shorten the prompt, or use a longer context and a larger cache.",
            )
        request.limit = min(request.limit, self.max_length - len(request.prompt))
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.append(request)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan:
        """The next step. Empty only when nothing is unfinished."""
        plan = Plan()
        for request in list(self.running):
            if request.status == "decoding" and self._secure(request, plan):
                plan.decode.append(request)
        budget = self.token_budget - len(plan.decode) * (self.lookahead + 1)
        for request in self.running:
            if request.status == "prefilling":
                budget -= self._chunk(request, budget, plan)
        # Whoever was just pushed out for want of pages would only push others out in turn.
        while budget > 0 and not plan.preempted and (first := self._next()) is not None:
            if not self._admit(first, plan):
                break
            budget -= self._chunk(first, budget, plan)
        if not plan.prefill and not plan.decode and self.unfinished:
            # Everything asked for came from the prefix cache: it decodes at once.
            return self._merged(plan, self.schedule())
        return plan

    def advance(self, request: Request, rows: int, late: int = 0) -> None:
        """``rows`` leading rows are now sound (after tokens were appended); of the draft's all but
        the last ``late``."""
        pool = self.pool
        tokens = request.tokens(0, rows)
        pool.commit(request.table, tokens, rows, rows - late if pool.drafting else 0)
        if request.status == "prefilling" and rows >= request.wanted_rows:
            request.status = "decoding"

    def finish(self, request: Request) -> None:
        """It is done or no longer wanted, in whatever state: pages go back."""
        if request.status == "waiting":
            self.waiting.remove(request)
        elif request.status != "finished":
            self.running.remove(request)
        self.pool.close(request.table)
        request.status = "finished"

    def _secure(self, request: Request, plan: Plan) -> bool:
        """Slots for the anchor and a whole block, pushing the newest requests out if need be."""
        length = min(request.length + self.lookahead, self.max_length)
        while request.status == "decoding":
            copies = self.pool.reserve(request.table, length)
            if copies is not None:
                plan.copies += copies
                return True
            self._preempt(self.running[-1], plan)
        return False

    def _preempt(self, victim: Request, plan: Plan) -> None:
        self.running.remove(victim)
        self.pool.close(victim.table)
        victim.status = "waiting"
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _next(self) -> Request | None:
        """The first waiting request that may start; siblings wait for a prefill to share."""
        if len(self.running) >= self.max_requests:
            return None
        for request in self.waiting:
            first = request.sibling
            if first is None or first.output or first.status == "finished" or request.output:
                return request
        return None

    def _admit(self, request: Request, plan: Plan) -> bool:
        tokens = request.tokens(0, request.wanted_rows + bool(request.output))
        table = self.pool.open(tokens)
        length = min(request.length + self.lookahead, self.max_length)
        copies = self.pool.reserve(table, length)
        if copies is None:
            self.pool.close(table)
            return False
        plan.copies += copies
        if table.origin is not None:
            plan.restored.append((request, table.origin))
        request.table = table
        if request.cached_rows is None:
            request.cached_rows = table.rows
        request.status = "decoding" if table.rows >= request.wanted_rows else "prefilling"
        self.waiting.remove(request)
        self._insert(request)
        return True

    def _insert(self, request: Request) -> None:
        """``running`` is ordered by arrival: its last one is the newest."""
        place = len(self.running)
        while place and self.running[place - 1].arrival > request.arrival:
            place -= 1
        self.running.insert(place, request)

    def _chunk(self, request: Request, budget: int, plan: Plan) -> int:
        rows, branch = request.table.rows, request.table.branch
        count = min(request.wanted_rows - rows, budget)
        if rows < branch < rows + count:  # so that the chunk's last state is the one to keep
            count = branch - rows
        if (snapshots := self.pool.snapshots) is not None:
            # The state behind a boundary that lies further back in the chunk would be lost.
            reach = rows + count
            ends = reach == request.wanted_rows and not request.output
            boundary = (reach - ends) // self.pool.page_size * self.pool.page_size
            if rows < boundary < reach - snapshots.tail:
                count = boundary - rows
        if count > 0:
            plan.prefill.append(Chunk(request, rows, count))
        return max(count, 0)

    @staticmethod
    def _merged(first: Plan, second: Plan) -> Plan:
        return Plan(
            first.copies + second.copies,
            second.prefill,
            second.decode,
            first.preempted + second.preempted,
            first.restored + second.restored,
        )

    def __iter__(self) -> Iterator[Request]:
        """Every unfinished request."""
        yield from self.running
        yield from self.waiting
