"""Scheduling in the real engine: the text stays, the counters are true, drafting is left and taken
up again."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from dspark.decoding.cost import CostTable, Curve
from dspark.decoding.params import SamplingParams
from dspark.engine.admission import COAST
from dspark.engine.confidence import Confidence, Mode
from dspark.engine.cost_file import fingerprint, read_costs, write_costs
from dspark.engine.history import ALLOWED, LEAST_BLOCKS, SHARE
from dspark.engine.measure import costs_hold, measure_costs, sizes
from dspark.engine.recording import record_blocks
from dspark.errors import DecodingError
from engine.pairs import Pair, check_rows_after_decoding, run

SCHEDULERS = ("threshold", "sync", "async")


def costs(per_token: float, draft: float = 1e-4) -> CostTable:
    """A step of 1 ms and ``per_token`` for each token; frozen."""
    return CostTable(
        Curve((1, 64), (draft, draft * 1.5)),
        Curve((1, 2, 512), (1e-3, 1e-3 + per_token, 1e-3 + 511 * per_token)),
        frozen=True,
    )


def scheduled(pair: Pair, scheduler: str, table: CostTable | None, **options):
    engine = pair.engine(scheduler=scheduler, min_gain=0.0, **options)
    engine.admission.costs = table
    return engine


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 48, **fields})


def totals(completions) -> tuple[int, int, int]:
    counts = [c.acceptance for c in completions]
    return tuple(sum(getattr(c, n) for c in counts) for n in ("drafted", "admitted", "accepted"))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("per_token", [1e-5, 2e-4])
def test_greedy_text_is_the_plain_text_under_every_scheduler(
    pair: Pair, scheduler: str, per_token: float
) -> None:
    plain = run(pair.engine(draft=False), pair.prompts[:12], greedy())
    draft = run(scheduled(pair, scheduler, costs(per_token)), pair.prompts[:12], greedy())
    assert [c.ids for c in draft] == [c.ids for c in plain]
    drafted, admitted, accepted = totals(draft)
    assert drafted >= admitted >= accepted > 20
    for c in draft:
        assert len(c.ids) <= 1 + c.acceptance.accepted + c.acceptance.steps + 1


def test_dear_tokens_are_drafted_and_not_admitted(pair: Pair) -> None:
    whole = totals(run(scheduled(pair, "fixed", costs(3e-4)), pair.prompts, greedy()))
    cut = totals(run(scheduled(pair, "sync", costs(3e-4)), pair.prompts, greedy()))
    assert whole[0] == whole[1]
    assert cut[1] < 0.9 * cut[0]
    # What is left out is what would have been rejected.
    assert cut[2] / cut[1] > 1.1 * whole[2] / whole[1]


def test_rows_are_sound_after_trimmed_and_bypassed_steps(pair: Pair) -> None:
    for table in (costs(3e-4), costs(1e-4)):
        engine = scheduled(pair, "sync", table)
        params = greedy(temperature=1.5, seed=4, ignore_eos=True, max_new_tokens=150)
        check_rows_after_decoding(engine, pair.prompts[0], params)


def test_without_costs_everything_is_verified_and_the_banner_says_so(pair: Pair) -> None:
    engine = scheduled(pair, "sync", None)
    assert "every drafted token is verified" in engine.admission.banner
    assert "cost table" in engine.admission.banner
    drafted, admitted, _ = totals(run(engine, pair.prompts[:6], greedy()))
    assert drafted == admitted > 0
    ready = scheduled(pair, "sync", costs(1e-4))
    assert "sync" in ready.admission.banner
    assert "no cost table" not in ready.admission.banner


def test_drafting_that_does_not_pay_is_left_and_tried_again(pair: Pair) -> None:
    """A draft pass of five steps' time: nothing can pay."""
    engine = scheduled(pair, "sync", costs(1e-5, draft=5e-2))
    done = run(engine, pair.prompts[:4], greedy(max_new_tokens=128, ignore_eos=True))
    plain = run(
        pair.engine(draft=False), pair.prompts[:4], greedy(max_new_tokens=128, ignore_eos=True)
    )
    assert [c.ids for c in done] == [c.ids for c in plain]
    admission = engine.admission
    assert admission.bypassed > 4 * admission.drafting
    learning = LEAST_BLOCKS
    assert admission.drafting > learning, "never tried again"
    steps = sum(c.acceptance.steps for c in done)
    assert steps == admission.bypassed + admission.drafting


def test_a_settled_decision_stands_for_a_few_steps_and_the_text_stays(pair: Pair) -> None:
    """Weighing costs time: while all draft and all is verified, most steps do without."""
    engine = pair.engine(scheduler="sync")
    engine.admission.costs = costs(1e-6)
    weighed = []
    learn = engine.admission.confidence.learn
    engine.admission.confidence.learn = lambda *a: (weighed.append(1), learn(*a))[1]
    asked = greedy(max_new_tokens=128, ignore_eos=True)
    # One after the other: a request that comes or goes ends the pause.
    done = [run(engine, [prompt], asked)[0] for prompt in pair.prompts[:8]]
    plain = run(pair.engine(draft=False), pair.prompts[:8], asked)
    assert [c.ids for c in done] == [c.ids for c in plain]
    drafted, admitted, accepted = totals(done)
    steps = sum(c.acceptance.steps for c in done)
    assert drafted == admitted > accepted
    assert engine.admission.drafting + engine.admission.bypassed == steps
    rest = steps - LEAST_BLOCKS
    assert LEAST_BLOCKS + rest / (COAST + 1) <= len(weighed) < LEAST_BLOCKS + rest / 3


def test_nobody_is_weighed_again_before_it_is_due(pair: Pair) -> None:
    """Steps of which all are bypassed count towards the next try, weighed or not."""
    engine = scheduled(pair, "sync", costs(1e-5, draft=5e-2))
    weighed, weigh = [], engine.admission._weigh
    engine.admission._weigh = lambda *a: (weighed.append(1), weigh(*a))[1]
    asked = greedy(max_new_tokens=128, ignore_eos=True)
    for prompt in pair.prompts[:4]:
        run(engine, [prompt], asked)
    steps = engine.admission.drafting + engine.admission.bypassed
    assert engine.admission.bypassed > 200
    assert len(weighed) < 0.35 * steps
    tried = engine.admission.drafting - LEAST_BLOCKS
    assert tried >= 4, "every request is tried"


def test_no_request_drafts_while_too_much_is_owed_and_all_do_afterwards(pair: Pair) -> None:
    engine = scheduled(pair, "sync", costs(1e-6))
    asked = greedy(max_new_tokens=64, ignore_eos=True)
    run(engine, pair.prompts[:8], asked)
    admission = engine.admission
    admission.costs.frozen = False
    admission._debt.owed[1] = ALLOWED + 19.5 * SHARE
    before, bypassed = admission.drafting, admission.bypassed
    done = run(engine, pair.prompts[:1], asked)
    assert admission.bypassed - bypassed >= 20
    assert admission.drafting > before, "afterwards it drafts"
    plain = run(pair.engine(draft=False), pair.prompts[:1], asked)
    assert [c.ids for c in done] == [c.ids for c in plain]


def test_what_fixed_requests_lose_is_not_owed_by_others(pair: Pair) -> None:
    engine = scheduled(pair, "sync", costs(1e-6))
    engine.admission.costs.frozen = False
    params = [greedy(scheduler=name) for name in ("fixed", "sync")]
    run(engine, pair.prompts[:2], params)
    assert not engine.admission._debt.owed[2], "of two requests"


def test_what_costs_promise_and_steps_do_not_keep_is_left(pair: Pair) -> None:
    """The table says drafting is free; in truth it is slow."""
    table = costs(1e-6, draft=1e-6)
    table.frozen = False
    engine = scheduled(pair, "sync", table)
    draft = engine.runner.draft

    def slow(requests):
        if requests:
            time.sleep(0.05)
        return draft(requests)

    engine.runner.draft = slow
    done = run(engine, pair.prompts[:6], greedy(max_new_tokens=128, ignore_eos=True))
    plain = run(
        pair.engine(draft=False), pair.prompts[:6], greedy(max_new_tokens=128, ignore_eos=True)
    )
    assert [c.ids for c in done] == [c.ids for c in plain]
    assert engine.admission.bypassed > engine.admission.drafting > LEAST_BLOCKS


def test_a_request_that_is_taken_up_again_accepts_as_before(pair: Pair) -> None:
    """Context rows of bypassed steps are there: acceptance does not suffer from the pause."""
    prompts = pair.prompts[:8]
    always = run(pair.engine(), prompts, greedy(ignore_eos=True, max_new_tokens=80))
    engine = scheduled(pair, "sync", costs(1e-5, draft=5e-2))
    names = [engine.submit(p, greedy(ignore_eos=True, max_new_tokens=80)) for p in prompts]
    for _ in range(12):
        engine.step()
    assert engine.admission.bypassed > 40
    before = engine.admission.drafting
    engine.admission.costs = costs(1e-6)
    while engine.unfinished:
        engine.step()
    assert engine.admission.drafting > before + 20
    done = [engine.collect(name).completions[0] for name in names]
    assert [c.ids for c in done] == [c.ids for c in always]
    rate = [totals(x)[2] / max(totals(x)[1], 1) for x in (done, always)]
    assert rate[0] > 0.7 * rate[1]


def test_each_request_may_name_its_scheduler(pair: Pair) -> None:
    names = ["fixed", "threshold", "sync", "async", None]
    params = [greedy(scheduler=names[i % 5]) for i in range(15)]
    plain = run(pair.engine(draft=False), pair.prompts[:15], greedy())
    engine = scheduled(pair, "fixed", costs(3e-4), confidence_threshold=0.5)
    done = run(engine, pair.prompts[:15], params)
    assert [c.ids for c in done] == [c.ids for c in plain]
    for i, completion in enumerate(done):
        if names[i % 5] in ("fixed", None):
            assert completion.acceptance.admitted == completion.acceptance.drafted
    trimmed = totals([c for i, c in enumerate(done) if names[i % 5] == "threshold"])
    assert trimmed[1] < trimmed[0]
    with pytest.raises(DecodingError, match="scheduler"):
        replace(params[0], scheduler="magic")


def test_a_grammar_and_a_scheduler_go_together(pair: Pair) -> None:
    params = greedy(stop=(". so ",), repetition_penalty=1.2, logprobs=1)
    plain = run(pair.engine(draft=False), pair.prompts[:8], params)
    done = run(scheduled(pair, "async", costs(2e-4)), pair.prompts[:8], params)
    assert [(c.ids, c.text, len(c.logprobs)) for c in done] == [
        (c.ids, c.text, len(c.logprobs)) for c in plain
    ]


def test_costs_are_measured_without_a_trace(pair: Pair) -> None:
    engine = pair.engine(scheduler="sync", max_requests=4)
    table = measure_costs(engine, seconds=0.5)
    assert (np.diff(table.verify_seconds(32)) >= 0).all()
    assert table.draft_seconds(4)[1] > 0
    assert not engine.runner.samplers
    assert not engine.admission.tracks
    assert engine.pool.available == engine.pool.count
    engine.admission.costs = table
    plain = run(pair.engine(draft=False), pair.prompts[:4], greedy())
    assert [c.ids for c in run(engine, pair.prompts[:4], greedy())] == [c.ids for c in plain]
    assert table.observed > 0
    engine.submit(pair.prompts[0], greedy())
    with pytest.raises(DecodingError, match="in work"):
        measure_costs(engine)
    assert sizes(128, 8)[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert sizes(16, 1) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_a_cost_file_serves_its_own_machine_and_pair_only(pair: Pair, tmp_path) -> None:
    engine = pair.engine(scheduler="sync")
    mine = fingerprint(engine, "target", "draft")
    assert read_costs(mine, tmp_path) is None
    path = write_costs(costs(1e-4), mine, tmp_path)
    assert read_costs(mine, tmp_path).as_json() == costs(1e-4).as_json()
    assert read_costs({**mine, "draft": "another"}, tmp_path) is None
    raw = json.loads(path.read_text())
    raw["measured_on"]["threads"] = 999
    path.write_text(json.dumps(raw))
    with pytest.raises(DecodingError, match="threads"):
        read_costs(mine, tmp_path)
    path.write_text("{")
    with pytest.raises(DecodingError, match="readable"):
        read_costs(mine, tmp_path)


def test_saved_costs_that_are_far_too_high_are_measured_again(pair: Pair) -> None:
    engine = pair.engine(scheduler="sync", max_requests=4)
    table = measure_costs(engine, seconds=0.5)
    true = table.as_json()

    def scaled(verify: list[float]) -> CostTable:
        knots = [[n, s * verify[0 if n == 1 else 1]] for n, s in true["verify"]]
        return CostTable.from_json({"draft": true["draft"], "verify": knots})

    assert costs_hold(engine, scaled([0.2, 0.2])), "a machine that is busy now proves nothing"
    assert not costs_hold(engine, scaled([1, 60])), "one that was busy while a block was timed"
    assert not costs_hold(engine, scaled([60, 60]))
    assert not engine.runner.samplers


def test_recorded_blocks_are_whole_and_know_their_answer(pair: Pair) -> None:
    engine = pair.engine()
    prompts = pair.prompts[:6]
    logits, accepted, answers = record_blocks(engine, prompts, [greedy()] * 6).arrays()
    assert logits.shape == (len(accepted), engine.admission.slots)
    assert np.isfinite(logits).all()
    assert set(answers.tolist()) <= set(range(6))
    assert 0 <= accepted.min() < accepted.max() <= engine.admission.slots
    assert engine.admission.record is None
    with pytest.raises(DecodingError, match="fixed"):
        record_blocks(pair.engine(scheduler="sync"), prompts, [greedy()] * 6)


def test_odd_temperatures_learn_together_and_calibrated_ones_apart() -> None:
    confidence = Confidence(7, {Mode("block", False, 0.73): [1.0] * 7})
    assert confidence.mode(Mode("block", False, 0.73)).temperature == 0.73
    near = {confidence.mode(Mode("block", False, t)) for t in (0.67, 0.7, 0.731)}
    assert len(near) == 1
    assert confidence.mode(Mode("block", False, 0.01)) != confidence.mode(Mode("greedy", True, 0.0))


@pytest.mark.parametrize("scheduler", ["fixed", *SCHEDULERS])
@pytest.mark.parametrize("limit", [1, 3])
def test_fewer_draft_tokens_and_requests_without_drafts_go_with_every_scheduler(
    pair: Pair, scheduler: str, limit: int
) -> None:
    """Requests of all kinds in one batch: each keeps its text, its limit and its own counters."""
    prompts = pair.prompts[:12]
    each = [
        greedy(speculate=i % 3 != 0, scheduler=(None, "fixed", "sync")[i % 3 if i % 2 else 0])
        for i in range(len(prompts))
    ]
    plain = run(pair.engine(draft=False), prompts, greedy())
    engine = scheduled(pair, scheduler, costs(1e-5), draft_tokens=limit)
    done = run(engine, prompts, each)
    assert [c.ids for c in done] == [c.ids for c in plain]
    for params, answer in zip(each, done, strict=True):
        count = answer.acceptance
        assert count.drafted <= limit * count.steps
        assert (count.drafted > 0) == params.speculate
        assert count.drafted >= count.admitted >= count.accepted
    assert totals(done)[2] > 20
