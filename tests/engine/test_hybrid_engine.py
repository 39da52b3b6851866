"""A hybrid target in the engine: texts are those of plain decoding whatever happens to a request."""

from __future__ import annotations

import random

import pytest

from dspark.decoding.params import SamplingParams
from dspark.decoding.request import GenerationRequest
from dspark.engine.answer import Completion
from dspark.engine.core import EngineCore
from dspark.engine.generate import BatchGenerator
from dspark.engine.measure import measure_costs
from dspark.engine.selftest import all_cases, run_case, tiny_pair
from dspark.errors import DecodingError
from dspark.model.states import SlotStates
from engine.hybrid_pairs import BLOCK, SIZE, VOCAB, HybridPair, check_state, settled_states


@pytest.fixture(scope="module")
def pair() -> HybridPair:
    return HybridPair.of()


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, **fields})


def prompts(count: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, VOCAB - 1) for _ in range(shared)]
    return [
        head + [rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(1, 30))]
        for _ in range(count)
    ]


def run(core: EngineCore, texts: list[list[int]], params=None) -> list[Completion]:
    names = [core.submit(text, params or greedy()) for text in texts]
    while core.unfinished:
        core.step()
        settled_states(core)
    hybrid = core.runner._hybrid
    assert core.pool.available == core.pool.count, "pages leaked"
    assert not hybrid._slots
    assert sorted(hybrid._free) == list(range(core.options.max_requests)), "slots leaked"
    return [core.collect(name).completions[0] for name in names]


@pytest.fixture(scope="module")
def plain(pair) -> list[Completion]:
    return run(pair.engine(draft=False, max_requests=1, prefix_cache=False), prompts(10))


def test_drafted_text_is_the_plain_text_in_batches(pair, plain) -> None:
    drafted = run(pair.engine(max_requests=5, prefix_cache=False), prompts(10))
    assert [c.ids for c in drafted] == [c.ids for c in plain]
    counted = [c.acceptance for c in drafted]
    accepted, admitted = sum(c.accepted for c in counted), sum(c.admitted for c in counted)
    assert admitted / 10 < accepted < admitted * 0.9, "acceptance and rejection must both happen"


@pytest.mark.parametrize("draft", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_preempted_requests_end_as_if_they_had_never_been(pair, plain, draft: bool) -> None:
    tight = run(pair.engine(draft=draft, pages=26, prefix_cache=draft), prompts(10))
    assert sum(c.preemptions for c in tight) > 3
    assert [c.ids for c in tight] == [c.ids for c in plain]


def test_prompts_in_chunks_answer_as_whole_ones(pair, plain) -> None:
    chunked = pair.engine(max_requests=2, max_batch_tokens=2 * (BLOCK + 1) + 1)
    assert [c.ids for c in run(chunked, prompts(10))] == [c.ids for c in plain]


def test_sampled_text_does_not_depend_on_the_batch(pair) -> None:
    texts = prompts(8, seed=3)
    params = [greedy(temperature=1.0, seed=i) for i in range(8)]
    found = []
    for width in (1, 4):
        core = pair.engine(max_requests=width, prefix_cache=False)
        names = [core.submit(t, p) for t, p in zip(texts, params, strict=True)]
        while core.unfinished:
            core.step()
        found.append([core.collect(name).completions[0].ids for name in names])
    assert found[0] == found[1]


def hit(core: EngineCore, text: list[int], params=None) -> tuple[int, Completion]:
    name = core.submit(text, params or greedy())
    while core.unfinished:
        core.step()
        settled_states(core)
    out = core.collect(name)
    return out.cached_tokens, out.completions[0]


@pytest.mark.parametrize("length", [23, 24, 25])
def test_the_same_prompt_again_starts_at_its_last_boundary(pair, length: int) -> None:
    core = pair.engine()
    text = prompts(1, seed=length, shared=length)[0][:length]
    cold, first = hit(core, text)
    warm, second = hit(core, text)
    assert cold == 0
    assert warm == (length - 1) // SIZE * SIZE
    assert second.ids == first.ids
    assert second.acceptance == first.acceptance


def test_a_shared_beginning_is_found_from_the_third_prompt_on(pair) -> None:
    """The second prompt shows where they part; its prefill leaves a state there."""
    core = pair.engine()
    alone = pair.engine(prefix_cache=False)
    texts = [[*t, 1, 2, 3] for t in prompts(5, seed=9, shared=41)]
    found = [hit(core, text) for text in texts]
    assert [cached for cached, _ in found] == [0, 0, 40, 40, 40]
    for text, (_, answer) in zip(texts, found, strict=True):
        cold = hit(alone, text)[1]
        assert answer.ids == cold.ids
        assert answer.acceptance == cold.acceptance


def test_the_next_turn_continues_behind_the_answer(pair) -> None:
    core = pair.engine()
    text = prompts(1, seed=4)[0]
    _, first = hit(core, text)
    turn = [*text, *first.ids, 5, 4, 3]
    cached, second = hit(core, turn)
    assert cached >= (len(text) + len(first.ids) - BLOCK - 1) // SIZE * SIZE - SIZE
    assert cached > len(text)
    assert second.ids == hit(pair.engine(prefix_cache=False), turn)[1].ids


def test_answers_to_one_prompt_share_its_prefill(pair) -> None:
    core = pair.engine()
    name = core.submit([1, 2, 3, 4, 5] * 6, greedy(n=3, temperature=1.0, seed=1))
    while core.unfinished:
        core.step()
        settled_states(core)
    done = core.collect(name)
    assert len({c.ids for c in done.completions}) == 3
    again = pair.engine(prefix_cache=False)
    other = again.submit([1, 2, 3, 4, 5] * 6, greedy(n=3, temperature=1.0, seed=1))
    while again.unfinished:
        again.step()
    assert [c.ids for c in again.collect(other).completions] == [c.ids for c in done.completions]


def test_kept_states_are_bounded_and_the_oldest_goes_first(pair) -> None:
    core = pair.engine(state_snapshots=2)
    texts = prompts(4, seed=6, shared=0)
    texts = [t + [3] * 12 for t in texts]
    for text in texts:
        hit(core, text, greedy(max_new_tokens=1))
    assert len(core.pool.snapshots) == 2
    assert hit(core, texts[3], greedy(max_new_tokens=1))[0] > 0
    assert hit(core, texts[0], greedy(max_new_tokens=1))[0] == 0


def test_forgotten_texts_are_computed_again(pair) -> None:
    core = pair.engine()
    text = [1, 2, 3, 4, 5] * 6
    hit(core, text)
    core.pool.forget_all()
    assert len(core.pool.snapshots) == 0
    assert hit(core, text)[0] == 0


def test_a_step_that_fails_loses_no_slot(pair, monkeypatch) -> None:
    core = pair.engine()
    core.submit([1, 2, 3, 4, 5] * 6, greedy(), id="a")
    monkeypatch.setattr(core.pool, "keep_state", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.step()
    monkeypatch.undo()
    core.forget("a")
    run(core, prompts(4))
    core.pool.snapshots.forget_all()
    core.pool.snapshots.reclaim()
    assert len(core.pool.snapshots._free) == core.options.state_snapshots


def test_costs_are_measured_and_leave_nothing_behind(pair, plain) -> None:
    core = pair.engine(scheduler="sync", prefix_cache=True)
    table = measure_costs(core, seconds=0.05)
    assert table.verify_seconds(BLOCK + 1)[1] > 0
    assert not core.runner._hybrid._slots
    assert [c.ids for c in run(core, prompts(10))] == [c.ids for c in plain]


def test_a_cache_that_cannot_hold_the_states_is_refused(pair) -> None:
    with pytest.raises(DecodingError, match="state_snapshots"):
        pair.engine(cache_gib=1e-5)


def test_kept_states_are_those_of_their_texts(pair) -> None:
    core = pair.engine(state_snapshots=12)
    texts = prompts(6, seed=11, shared=9)
    answers = run(core, texts)
    pool, checked = core.pool, 0
    for text, answer in zip(texts, answers, strict=True):
        whole = [*text, *answer.ids]
        table = pool.open([*whole, 0])
        if table.pages:
            check_state(core, whole[: table.rows], table.origin)
            checked += 1
        pool.close(table)
    assert checked >= 5


HYBRID = [case for case in all_cases() if case.hybrid]


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=pytest.mark.slow) for case in HYBRID[:2]), HYBRID[2]],
    ids=lambda c: f"{c.verification}-{c.draft}",
)
def test_the_emitted_distribution_is_the_hybrid_targets(case) -> None:
    result = run_case(tiny_pair(hybrid=True), case, 3000)
    assert result.p_value > 1e-4, result
    assert result.acceptance_length > 1.1


def test_states_that_keep_rejected_tokens_are_convicted(monkeypatch) -> None:
    sound = SlotStates.commit

    def wrong(self, counts, saved=()):
        sound(self, list(self.layout.lengths), saved)

    monkeypatch.setattr(SlotStates, "commit", wrong)
    assert run_case(tiny_pair(hybrid=True), HYBRID[0], 3000).p_value < 1e-8


@pytest.mark.parametrize("page_size", [40, 64])
def test_large_pages_lose_no_state(pair, page_size: int) -> None:
    """A prompt that ends far behind its last page boundary is found again up to there."""
    rng = random.Random(page_size)
    text = [rng.randrange(1, VOCAB - 1) for _ in range(2 * page_size - 2)]
    want = run(pair.engine(draft=False, max_requests=1, prefix_cache=False), [text])[0]
    core = pair.engine(page_size=page_size, max_requests=2)
    assert run(core, [text])[0].ids == want.ids
    name = core.submit(text, greedy())
    while core.unfinished:
        core.step()
    again = core.collect(name)
    assert again.cached_tokens == page_size
    assert again.completions[0].ids == want.ids


def answers_of(pair, texts: list[list[int]], batch: int) -> dict[str, tuple[int, ...]]:
    generator = BatchGenerator(pair.target, frozenset(), batch, 100)
    requests = [
        GenerationRequest(str(i), tuple(text), greedy(temperature=i % 2, seed=i))
        for i, text in enumerate(texts)
    ]
    found: dict[str, tuple[int, ...]] = {}
    seen: list[int] = []
    generator.run(requests, lambda r: found.__setitem__(r.id, r.ids), seen.append)
    assert sum(seen) == sum(map(len, found.values()))
    return found


@pytest.mark.parametrize("shared", [0, 20])
def test_answers_in_batches_are_those_of_one_at_a_time(pair, shared: int) -> None:
    texts = prompts(12, seed=4, shared=shared)
    assert len({len(t) for t in texts}) < 12, "some share a prefill"
    alone = answers_of(pair, texts, 1)
    for batch in (3, 12):
        assert answers_of(pair, texts, batch) == alone
