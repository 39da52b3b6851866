"""The engine under asyncio: callers who leave at any moment, steps that fail, what deltas tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dspark import Engine, SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.asynchronous import StepError
from dspark.errors import DecodingError
from server.serving import make_engine

LONG = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=1.0, seed=1)


def chat(text: str = "x") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def is_idle(engine: Engine) -> bool:
    core = engine.core
    return core.pool.available == core.pool.count and not core._groups and not core.unfinished


@pytest.fixture
def engine(made_pair: tuple[Path, Path]) -> Engine:
    return make_engine(made_pair, max_requests=2)


def test_events_end_with_the_result_and_add_up(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=60, n=2)

    async def run() -> list[Any]:
        return [event async for event in engine.events_async(chat(), params)]

    *deltas, output = asyncio.run(run())
    assert isinstance(output, RequestOutput)
    for completion in output.completions:
        own = [d for d in deltas if isinstance(d, Delta) and d.index == completion.index]
        assert "".join(d.text for d in own) == completion.text
        assert sum((d.ids for d in own), ()) == completion.ids
        assert sum((d.kinds for d in own), ()) == completion.kinds
        steps = [d.count for d in own if d.count is not None]
        assert sum(s.accepted for s in steps) == completion.acceptance.accepted
        assert len(steps) == completion.acceptance.steps
        for delta in own:
            assert len(delta.starts) == len(delta.ids)
            if delta.count is not None and delta.kinds[-1] == "corrected":
                assert len(delta.rejected) == delta.count.admitted - delta.count.accepted > 0
    total = engine.core.totals
    assert total.accepted == sum(c.acceptance.accepted for c in output.completions)
    assert output.completions == engine.generate(chat(), params)[0].completions


def test_places_of_tokens_are_where_their_text_begins(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=80)
    pieces = list(engine.stream(chat("place"), params))
    text = "".join(d.text for d in pieces)
    ids = [i for d in pieces for i in d.ids]
    starts = [s for d in pieces for s in d.starts]
    assert starts[0] == 0
    for place, (token, start) in enumerate(zip(ids, starts, strict=True)):
        own = engine.decode([token])
        if "\ufffd" not in own and start < len(text):
            # Bytes that never became a character may still stand before it.
            assert text[start:].lstrip("\ufffd").startswith(own), (place, own)


def test_callers_who_leave_at_any_moment_leave_nothing_behind(engine: Engine) -> None:
    async def visit(number: int) -> None:
        async for _ in engine.events_async(chat(str(number)), LONG):
            pass

    async def run() -> None:
        for wait in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1):
            tasks = [asyncio.ensure_future(visit(i)) for i in range(6)]
            for task in tasks:
                await asyncio.sleep(wait / 6)
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(x, asyncio.CancelledError) for x in found)
        # One that stays is served among those who went, and closing frees before it returns.
        output = await engine.generate_async(chat("stay"), SamplingParams(max_new_tokens=5))
        assert len(output.completions[0].ids) == 5
        events = engine.events_async(chat("close"), LONG)
        await anext(events)
        await events.aclose()
        assert is_idle(engine)

    asyncio.run(run())
    assert not engine._driver._streams
    assert is_idle(engine)


def test_a_step_that_fails_ends_who_ran_in_it_and_serves_who_waited(engine: Engine) -> None:
    step, calls = engine.core.step, 0

    def fragile() -> list[Delta]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ValueError("broken")
        return step()

    engine.core.step = fragile

    async def one(number: int) -> Any:
        return await engine.generate_async(chat(str(number)), SamplingParams(max_new_tokens=40))

    async def run() -> list[Any]:
        return await asyncio.gather(*(one(i) for i in range(5)), return_exceptions=True)

    results = asyncio.run(run())
    failed = [r for r in results if isinstance(r, StepError)]
    assert len(failed) == 2, "two were running"
    assert isinstance(failed[0].__cause__, ValueError)
    assert sum(isinstance(r, RequestOutput) for r in results) == 3
    assert is_idle(engine)


def test_an_id_in_use_and_ids_that_are_no_tokens_are_refused(engine: Engine) -> None:
    async def run() -> None:
        events = engine.events_async(chat(), LONG, "same")
        await anext(events)
        with pytest.raises(DecodingError, match="in use"):
            await engine.generate_async(chat(), LONG, "same")
        await anext(events)
        await events.aclose()
        for ids in ([1, -1], [1, 10**6]):
            with pytest.raises(DecodingError, match="vocabulary"):
                await engine.generate_async(ids, LONG)

    asyncio.run(run())
    assert is_idle(engine)


def test_fewer_drafted_tokens_and_none_give_the_same_greedy_text(
    engine: Engine, made_pair: tuple[Path, Path]
) -> None:
    params = SamplingParams(max_new_tokens=60)
    whole = engine.generate(chat("width"), params)[0].completions[0]
    plain = engine.generate(chat("width"), SamplingParams(max_new_tokens=60, speculate=False))
    assert plain[0].completions[0].ids == whole.ids
    assert plain[0].acceptance.steps == 0
    narrow = make_engine(made_pair, draft_tokens=3).generate(chat("width"), params)[0]
    assert narrow.completions[0].ids == whole.ids
    assert narrow.acceptance.admitted_at[2] > 0
    assert narrow.acceptance.admitted_at[3:] == [0] * 4


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1e-300}, {"presence_penalty": 1e300}, {"logit_bias": {5: 1e300}},
     {"repetition_penalty": 1e30}],
)  # fmt: skip
def test_values_that_would_overflow_in_the_middle_of_a_batch_are_refused(fields: Any) -> None:
    with pytest.raises(DecodingError, match=next(iter(fields))):
        SamplingParams(**fields)
