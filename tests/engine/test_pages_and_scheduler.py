"""Pages and scheduler under random traffic: nothing leaks, nothing unwritten is ever read.

The state machine plays runner with a notebook instead of tensors. Every row remembers the text it
was computed from, so reading a row of another text, a rejected row, a row that only one of target
and draft has written, or a page someone else holds, is caught at once.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dspark.engine.pages import PagePool
from dspark.engine.request import Request
from dspark.engine.scheduler import Plan, Scheduler
from dspark.errors import DecodingError

SIZE, PAGES, LOOKAHEAD, MAX_LENGTH = 4, 9, 3, 30


def check_accounts(pool: PagePool, tables) -> None:
    """Every page is free, idle or held exactly as often as tables name it."""
    held: dict[int, int] = {}
    for table in tables:
        assert len(set(table.pages)) == len(table.pages)
        for page in table.pages:
            held[page] = held.get(page, 0) + 1
    for number, page in enumerate(pool.pages):
        assert page.holders == held.get(number, 0), number
        places = (number in pool._free, number in pool._idle, page.holders > 0)
        assert sum(places) == 1, (number, places)
        assert page.key is None or pool._found[page.key] == number
        assert not (number in pool._free and page.key is not None)
    assert all(pool.pages[p].key == key for key, p in pool._found.items())


class Traffic(RuleBasedStateMachine):
    """Random requests through a pool so small that preemption is daily business."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE, identity="pair")
        self.scheduler = Scheduler(
            self.pool, max_requests=3, token_budget=16, lookahead=LOOKAHEAD, max_length=MAX_LENGTH
        )
        self.rows: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.late: dict[Request, int] = {}
        self.counter = 0
        self.finished: list[Request] = []

    @rule(
        target=requests,
        head=st.integers(0, 2),
        length=st.integers(1, 20),
        limit=st.integers(1, 12),
        sibling=st.none() | requests,
    )
    def add(self, head: int, length: int, limit: int, sibling: Request | None) -> Request:
        self.counter += 1
        prompt = sibling.prompt if sibling else [head] * length
        request = Request(str(self.counter), list(prompt), limit, sibling=sibling)
        self.scheduler.add(request)
        return request

    @rule(request=consumes(requests))
    def abort(self, request: Request) -> None:
        self.finish(request)
        self.finished.append(request)

    def finish(self, request: Request) -> None:
        if self.catch_up(request):
            self.scheduler.advance(request, request.table.rows)
        self.scheduler.finish(request)

    def catch_up(self, request: Request) -> bool:
        """Write the draft rows of steps that it did not draft in."""
        count = self.late.pop(request, 0)
        rows = request.table.rows
        self.write(request, "draft", request.tokens(0, rows), rows - count)
        return count > 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        unfinished = self.scheduler.unfinished
        plan = self.scheduler.schedule()
        assert bool(plan.prefill or plan.decode) == unfinished
        self.check_budget(plan)
        for request in plan.preempted:
            self.late.pop(request, None)
        for source, to in plan.copies:
            for kind in ("target", "draft"):
                for offset in range(SIZE):
                    self.rows[kind, to, offset] = self.rows.get((kind, source, offset), ())
        for chunk in plan.prefill:
            r, stop = chunk.request, chunk.start + chunk.count
            self.read(r, "target", chunk.start)
            text = r.tokens(0, stop)
            self.write(r, "target", text, chunk.start)
            self.write(r, "draft", text, chunk.start)
            first = chunk.completes and not r.output
            if first:
                r.output.append(data.draw(st.integers(0, 2)))
            self.scheduler.advance(r, stop)
            if first and r.room < 1:
                self.finish(r)
        for r in plan.decode:
            anchor_at = r.length - 1
            assert r.table.rows == anchor_at
            self.read(r, "target", anchor_at)
            if data.draw(st.booleans()):
                self.write(r, "target", r.tokens(0, r.length), anchor_at)
                r.output.append(data.draw(st.integers(0, 2)))
                self.late[r] = self.late.get(r, 0) + 1
                self.scheduler.advance(r, anchor_at + 1, self.late[r])
                self.read(r, "draft", r.table.draft_rows)
                if r.room < 1:
                    self.finish(r)
                continue
            self.catch_up(r)
            self.read(r, "draft", anchor_at)
            admitted = min(LOOKAHEAD, r.room - 1)
            drafted = data.draw(st.lists(st.integers(0, 2), min_size=admitted, max_size=admitted))
            accepted = data.draw(st.integers(0, admitted))
            text = r.tokens(0, r.length)
            self.write(r, "target", [*text, *drafted], anchor_at)
            self.write(r, "draft", [*text, *drafted[:accepted]], anchor_at)
            r.output += [*drafted[:accepted], data.draw(st.integers(0, 2))]
            self.scheduler.advance(r, anchor_at + accepted + 1)
            if r.room < 1:
                self.finish(r)

    def check_budget(self, plan: Plan) -> None:
        tokens = sum(c.count for c in plan.prefill) + len(plan.decode) * (LOOKAHEAD + 1)
        assert tokens <= self.scheduler.token_budget
        assert len(self.scheduler.running) <= self.scheduler.max_requests

    def read(self, request: Request, kind: str, rows: int) -> None:
        text = tuple(request.tokens(0, rows))
        for row in range(rows):
            place = (kind, request.table.pages[row // SIZE], row % SIZE)
            assert self.rows.get(place) == text[: row + 1], (request.id, kind, row)

    def write(self, request: Request, kind: str, text: list[int], start: int) -> None:
        assert len(text) <= MAX_LENGTH
        for row in range(start, len(text)):
            page = request.table.pages[row // SIZE]
            assert self.pool.pages[page].holders == 1, "a shared page was written"
            assert self.pool.pages[page].key is None, "a page others may find was written"
            self.rows[kind, page, row % SIZE] = tuple(text[: row + 1])

    @invariant()
    def accounts_balance(self) -> None:
        check_accounts(self.pool, [r.table for r in self.scheduler])

    def teardown(self) -> None:
        for request in list(self.scheduler):
            self.scheduler.finish(request)
        assert self.pool.available == PAGES
        check_accounts(self.pool, [])


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def decode(scheduler: Scheduler, pool: PagePool, request: Request, tokens: int) -> None:
    """Prefill and generate ``tokens`` zeros, one a step."""
    while len(request.output) < tokens:
        plan = scheduler.schedule()
        for chunk in plan.prefill:
            rows = chunk.start + chunk.count
            if chunk.completes and not chunk.request.output:
                chunk.request.output.append(0)
            scheduler.advance(chunk.request, rows)
        for one in plan.decode:
            one.output.append(0)
            scheduler.advance(one, one.length - 1)


def made(pool: PagePool, **options: int) -> Scheduler:
    given = {"max_requests": 4, "token_budget": 64, "lookahead": LOOKAHEAD, "max_length": 64}
    return Scheduler(pool, **{**given, **options})


def test_a_whole_prompt_hit_copies_its_last_page_and_runs_one_token() -> None:
    pool = PagePool(20, SIZE)
    scheduler = made(pool)
    first = Request("1", list(range(8)), 4)
    scheduler.add(first)
    decode(scheduler, pool, first, 2)
    again = Request("2", list(range(8)), 4)
    scheduler.add(again)
    plan = scheduler.schedule()
    assert [(c.start, c.count) for c in plan.prefill] == [(7, 1)]
    assert again.cached_rows == 7
    (copy,) = plan.copies
    assert copy.source == first.table.pages[1]
    assert copy.to == again.table.pages[1]
    assert again.table.pages[0] == first.table.pages[0]


def test_a_page_without_draft_rows_is_not_shared() -> None:
    pool = PagePool(8, SIZE)
    table = pool.open(range(9))
    pool.reserve(table, 9)
    pool.commit(table, list(range(9)), 8, 4)
    assert len(pool.open(list(range(9))).pages) == 1
    pool.commit(table, list(range(9)), 9, 9)
    assert len(pool.open(list(range(9))).pages) == 2


def test_pages_of_another_draft_are_not_found() -> None:
    one, two = PagePool(8, SIZE, identity="a"), PagePool(8, SIZE, identity="b")
    keys = []
    for pool in (one, two):
        table = pool.open(range(8))
        pool.reserve(table, 8)
        pool.commit(table, range(8), 8, 8)
        keys.append(set(pool._found))
    assert not keys[0] & keys[1]


def test_least_recently_used_pages_go_first_and_ends_before_beginnings() -> None:
    pool = PagePool(6, SIZE)
    for start in (0, 100):
        table = pool.open(range(start, start + 8))
        pool.reserve(table, 8)
        pool.commit(table, range(start, start + 8), 8, 8)
        pool.close(table)
    pool.close(pool.open(range(9)))  # used again: now the newer of the two
    big = pool.open([9] * 13)
    assert pool.reserve(big, 13) is not None  # two free pages and two of text 100
    assert len(pool.open(range(9)).pages) == 2
    assert pool.open(range(100, 109)).pages == []


def test_a_lone_request_gets_one_run_of_pages() -> None:
    pool = PagePool(12, SIZE, share=False)
    for _ in range(7):
        table = pool.open([1] * 9)
        for length in range(1, 18):
            pool.reserve(table, length)
            pool.commit(table, [1] * length, length, length)
        assert table.pages == list(range(table.pages[0], table.pages[0] + len(table.pages)))
        pool.close(table)


def test_answers_to_one_prompt_are_prefilled_once() -> None:
    pool = PagePool(40, SIZE)
    scheduler = made(pool)
    first = Request("a", list(range(20)), 8)
    rest = [Request(f"a{i}", list(range(20)), 8, sibling=first) for i in range(2)]
    for request in (first, *rest):
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [c.request for c in plan.prefill] == [first]
    first.output.append(0)
    scheduler.advance(first, 20)
    plan = scheduler.schedule()
    assert [(c.request, c.count) for c in plan.prefill] == [(r, 1) for r in rest]
    assert plan.decode == [first]


def test_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    pool = PagePool(40, SIZE)
    scheduler = made(pool, token_budget=16)
    short, long = Request("s", [1] * 5, 9), Request("l", [2] * 40, 9)
    for request in (short, long):
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [(c.request.id, c.start, c.count) for c in plan.prefill] == [("s", 0, 5), ("l", 0, 11)]
    short.output.append(0)
    scheduler.advance(short, 5)
    scheduler.advance(long, 11)
    plan = scheduler.schedule()
    assert plan.decode == [short]
    assert [(c.start, c.count) for c in plan.prefill] == [(11, 12)]


def test_impossible_requests_and_options_are_refused() -> None:
    pool = PagePool(4, SIZE)
    with pytest.raises(DecodingError, match="token budget"):
        made(pool, token_budget=15)
    scheduler = made(pool)
    for prompt in ([], [1] * 16):
        with pytest.raises(DecodingError, match="prompt"):
            scheduler.add(Request("x", prompt, 4))
    request = Request("y", [1] * 12, 100)
    scheduler.add(request)
    assert request.limit == 4, "limits are clamped to what the cache can hold"
    with pytest.raises(DecodingError, match="page pool"):
        PagePool(0)


def test_scheduling_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, dspark.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
