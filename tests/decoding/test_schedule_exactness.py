"""Schedulers do not change what comes out: by enumeration, with the wrong ones convicted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark.decoding import schedule
from dspark.decoding.enumeration import MODES, honest, joint_error
from dspark.decoding.enumeration_schedule import (
    CURVES,
    SCHEDULERS,
    counterexample,
    first_token,
    looking_ahead,
    random_confidence,
    scheduled_width,
    shared_error,
    steps_error,
    survival_of,
)

EXACT, BIASED = 1e-12, 1e-3


def test_the_papers_counterexample_is_caught_and_ours_is_exact() -> None:
    decoder, confidence, seconds = counterexample()
    ahead = first_token(decoder, looking_ahead(confidence, seconds))
    assert ahead == pytest.approx([0.85, 0.15], abs=EXACT)
    for scheduler in SCHEDULERS:
        ours = first_token(decoder, scheduled_width(scheduler, confidence, seconds))
        assert ours == pytest.approx([0.7, 0.3], abs=EXACT)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("mode", MODES)
def test_one_block_keeps_the_targets_distribution(mode: str, scheduler) -> None:
    widths = set()
    for seed, seconds in zip((0, 1, 0), CURVES, strict=True):
        confidence = random_confidence(seed)
        width = scheduled_width(scheduler, confidence, seconds)
        assert joint_error(honest(mode, seed), width) <= EXACT
        widths |= {width(path) for path in itertools.product(range(3), repeat=3)}
    assert len(widths) > 1 or scheduler in ("fixed", "async")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("mode", ["block/probabilistic", "standard/one-hot"])
def test_steps_with_budgets_from_two_steps_before_keep_it(mode: str, scheduler) -> None:
    error = steps_error(honest(mode, 3), scheduler, random_confidence(3), CURVES[2])
    assert error <= EXACT


@pytest.mark.parametrize("kinds", list(itertools.product(SCHEDULERS, repeat=2)))
def test_two_requests_in_a_step_stay_independent(kinds) -> None:
    decoders = honest("block/probabilistic", 4), honest("standard/probabilistic", 5)
    confidences = random_confidence(4), random_confidence(5)
    assert shared_error(decoders, kinds, confidences, CURVES[0]) <= EXACT


def test_a_search_over_live_confidences_is_convicted() -> None:
    errors = [
        joint_error(
            honest("standard/probabilistic", seed), looking_ahead(random_confidence(seed), seconds)
        )
        for seed in range(6)
        for seconds in CURVES
    ]
    assert max(errors) > BIASED


def test_a_budget_from_the_blocks_own_confidences_is_convicted() -> None:
    """The asynchronous scheduler with no delay at all."""

    def impatient(confidence, seconds):
        def width(path):
            survival = survival_of(path, confidence)
            return int(schedule.top(survival, schedule.budget(survival, seconds))[0])

        return width

    decoder, confidence, seconds = counterexample()
    found = first_token(decoder, impatient(confidence, seconds))
    assert abs(found[0] - 0.7) > 0.1


def test_a_confidence_that_knows_its_own_token_is_convicted() -> None:
    def peeking(path):
        known = np.array([[0.9 if token else 0.1 for token in path]])
        return int(schedule.sync(schedule.survivals(known), CURVES[0])[0])

    errors = [joint_error(honest("block/probabilistic", seed), peeking) for seed in range(4)]
    assert max(errors) > BIASED
