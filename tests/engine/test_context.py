"""Context rows of requests that do not draft: late, never missing, and no page is shared without."""

from __future__ import annotations

import pytest

from dspark.decoding.params import SamplingParams
from dspark.engine import context
from dspark.engine.context import MOST_LATE
from dspark.engine.core import EngineCore
from dspark.engine.request import Request
from engine.pairs import Pair, check_rows, run

PLAIN = SamplingParams(max_new_tokens=100, ignore_eos=True, speculate=False)


def counted(core: EngineCore) -> list[int]:
    """Fills with how many rows each write of context rows made."""
    writes: list[int] = []
    write = core.runner.context.write

    def seen(taps, positions, slots):
        writes.append(len(positions))
        write(taps, positions, slots)

    core.runner.context.write = seen  # type: ignore[method-assign]
    return writes


def one(core: EngineCore) -> Request:
    (answer,) = core._answers.values()
    return answer.request


def test_rows_of_a_request_that_does_not_draft_are_written_together(pair: Pair) -> None:
    core = pair.engine()
    writes = counted(core)
    run(core, pair.prompts[:1], PLAIN)
    prompt = len(pair.prompts[0])
    assert writes == [prompt, MOST_LATE, 99 - MOST_LATE]
    nothing = pair.engine(prefix_cache=False)
    writes = counted(nothing)
    run(nothing, pair.prompts[:1], PLAIN)
    assert writes == [prompt, MOST_LATE], "nobody can go on from an answer that is not shared"


def test_many_requests_together_keep_no_more_states_than_some(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "ALL_LATE", 40)
    core = pair.engine()
    writes = counted(core)
    run(core, pair.prompts[:8], PLAIN)
    rows = sum(len(p) + 99 for p in pair.prompts[:8])
    assert sum(writes) == rows
    assert max(writes[1:]) == 40, "5 rows of each"


def test_late_rows_do_not_count_as_sound_and_written_ones_are_right(pair: Pair) -> None:
    core = pair.engine()
    core.submit(pair.prompts[0], PLAIN)
    for _ in range(41):
        core.step()
    request = one(core)
    table = request.table
    assert table.rows == request.length - 1
    assert table.draft_rows == table.rows - 40 == len(pair.prompts[0])
    check_rows(core, request, table.draft_rows)
    # Pages that are full, but not of the draft's rows, are found by nobody.
    assert len(table.keys) == table.draft_rows // core.pool.page_size
    for _ in range(MOST_LATE - 40):
        core.step()
    assert table.draft_rows == table.rows
    check_rows(core, request, table.rows)
    assert len(table.keys) == table.rows // core.pool.page_size


def test_who_goes_on_from_a_plain_answer_finds_it_with_its_draft_rows(pair: Pair) -> None:
    core, prompt = pair.engine(), pair.prompts[0]
    (first,) = run(core, [prompt], SamplingParams(max_new_tokens=80, speculate=False))
    text = [*prompt, *first.ids]
    core.submit([*text, *prompt], SamplingParams(max_new_tokens=8))
    core.step()
    request = one(core)
    kept = len(text) // core.pool.page_size * core.pool.page_size
    assert request.cached_rows == request.table.cached
    assert kept - core.pool.page_size <= request.table.cached <= kept
    assert request.table.cached > len(prompt)
    check_rows(core, request, request.table.draft_rows)


def test_an_aborted_answer_leaves_its_rows_too(pair: Pair) -> None:
    core, prompt = pair.engine(), pair.prompts[0]
    name = core.submit(prompt, PLAIN)
    for _ in range(40):
        core.step()
    text = one(core).tokens(0, len(prompt) + 38)
    core.abort(name)
    core.submit(text, PLAIN)
    core.step()
    assert one(core).table.cached == (len(text) - 1) // 16 * 16
    check_rows(core, one(core), one(core).table.draft_rows)


def test_preempted_in_the_middle_of_late_rows_the_texts_and_rows_stay(pair: Pair) -> None:
    asked = [PLAIN if i % 2 else SamplingParams(max_new_tokens=100, ignore_eos=True)
             for i in range(6)]  # fmt: skip
    roomy = run(pair.engine(), pair.prompts[:6], asked)
    tight = pair.engine(pages=24)
    names = [tight.submit(p, a) for p, a in zip(pair.prompts[:6], asked, strict=True)]
    preempted = 0
    while tight.unfinished:
        tight.step()
        for request in tight.scheduler.running:
            if request.status == "decoding":
                check_rows(tight, request, request.table.draft_rows)
        preempted += sum(r.preemptions for r in tight.scheduler.waiting)
    assert preempted
    done = [tight.collect(name).completions[0] for name in names]
    assert [c.ids for c in done] == [c.ids for c in roomy]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_request_that_drafts_after_a_pause_has_every_row(pair: Pair, page_size: int) -> None:
    core = pair.engine(page_size=page_size)
    core.submit(pair.prompts[0], SamplingParams(max_new_tokens=100, ignore_eos=True))
    choose, resting = core.admission.choose, True
    core.admission.choose = lambda *a: [] if resting else choose(*a)  # type: ignore[method-assign]
    for _ in range(30):
        core.step()
    request = one(core)
    assert request.table.rows - request.table.draft_rows == 29
    resting = False
    core.step()
    assert request.table.rows == request.table.draft_rows
    check_rows(core, request, request.table.rows)
