"""Counters against hand-computed values, intervals, and the cut at an end token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dspark.decoding.acceptance import (
    AcceptanceCounter,
    StepCount,
    bootstrap_interval,
    difference_interval,
    trim_at_end,
)
from dspark.errors import DecodingError

STEPS = [StepCount(3, 3, 3), StepCount(3, 2, 1), StepCount(3, 1, 1), StepCount(3, 0, 0)]


def counted(steps: list[StepCount], block_size: int = 3) -> AcceptanceCounter:
    counter = AcceptanceCounter(block_size)
    for step in steps:
        counter.add(step)
    return counter


def test_three_counts_stay_apart() -> None:
    counter = counted(STEPS)
    assert (counter.steps, counter.drafted, counter.admitted, counter.accepted) == (4, 12, 6, 5)
    assert counter.acceptance_length == 1 + 5 / 4


def test_slots_by_hand() -> None:
    counter = counted(STEPS)
    assert counter.admitted_at == [3, 2, 1]
    assert counter.accepted_at == [3, 1, 1]
    assert sum(counter.accepted_at) == counter.accepted


def test_length_without_steps_is_refused_and_is_one_without_acceptance() -> None:
    with pytest.raises(DecodingError, match="verify step"):
        _ = AcceptanceCounter(7).acceptance_length
    assert counted([StepCount(7, 0, 0)], 7).acceptance_length == 1.0


def test_merging_equals_counting_together() -> None:
    merged = counted(STEPS[:1])
    merged.merge(counted(STEPS[1:]))
    assert merged == counted(STEPS)


def test_merging_leaves_the_other_counter_alone() -> None:
    other = counted(STEPS)
    counted(STEPS).merge(other)
    assert other == counted(STEPS)


def test_counter_survives_a_round_trip_through_plain_data() -> None:
    counter = counted(STEPS)
    assert AcceptanceCounter(**dataclasses.asdict(counter)) == counter


def test_impossible_counts_are_refused() -> None:
    for drafted, admitted, accepted in ((3, 4, 0), (3, 2, 3), (3, 3, -1)):
        with pytest.raises(DecodingError, match="accepted <= admitted <= drafted"):
            StepCount(drafted, admitted, accepted)
    with pytest.raises(DecodingError, match="at most 3"):
        AcceptanceCounter(3).add(StepCount(4, 4, 4))
    with pytest.raises(DecodingError, match="block_size"):
        AcceptanceCounter(3).merge(AcceptanceCounter(4))
    with pytest.raises(DecodingError, match="block_size"):
        AcceptanceCounter(0)
    with pytest.raises(DecodingError, match="3 slots"):
        AcceptanceCounter(3, accepted_at=[1, 2])


def test_interval_holds_the_pooled_ratio_and_is_reproducible() -> None:
    numbers = np.random.default_rng(0)
    prompts = [(int(numbers.binomial(70, 0.4)), 10) for _ in range(40)]
    low, high = bootstrap_interval(prompts, seed=1)
    pooled = 1 + sum(a for a, _ in prompts) / sum(s for _, s in prompts)
    assert low < pooled < high
    assert (low, high) == bootstrap_interval(prompts, seed=1)
    wider = bootstrap_interval(prompts, seed=1, level=0.999)
    assert wider[0] < low
    assert wider[1] > high


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """300 experiments of 30 prompts with unequal lengths and correlated steps."""
    numbers = np.random.default_rng(4)
    covered = 0
    for trial in range(300):
        steps = numbers.integers(5, 30, size=30)
        easy = numbers.uniform(1.0, 5.0, size=30)  # accepted per step of this prompt; mean 3
        accepted = numbers.poisson(easy * steps)
        pairs = [(int(a), int(s)) for a, s in zip(accepted, steps, strict=True)]
        low, high = bootstrap_interval(pairs, seed=trial, level=0.9, resamples=400)
        covered += low <= 1 + 3.0 <= high
    assert 0.82 <= covered / 300 <= 0.95


def test_difference_on_the_same_prompts_is_far_tighter_than_two_intervals() -> None:
    """Prompts differ by factors, drafts by a tenth: only pairing sees it."""
    numbers = np.random.default_rng(2)
    steps = numbers.integers(10, 40, size=50)
    easy = numbers.uniform(0.5, 5.0, size=50)
    first = [(round(e * s), int(s)) for e, s in zip(easy, steps, strict=True)]
    second = [(round((e - 0.1) * s), int(s)) for e, s in zip(easy, steps, strict=True)]
    change, low, high = difference_interval(first, second, seed=0)
    assert low < change < high < 0
    assert abs(change + 0.1) < 0.01
    single = bootstrap_interval(first, seed=0)
    assert (high - low) * 10 < single[1] - single[0]
    assert difference_interval(first, first, seed=0) == (0.0, 0.0, 0.0)
    assert difference_interval(second, first, seed=0)[0] == -change


def test_difference_needs_the_same_prompts_on_both_sides() -> None:
    with pytest.raises(DecodingError, match="2 and 1 prompts"):
        difference_interval([(1, 1), (2, 2)], [(1, 1)], seed=0)
    with pytest.raises(DecodingError, match="at least one prompt"):
        difference_interval([(0, 0)], [(3, 2)], seed=0)
    # One arm answered with the first token alone: no pair, no weight.
    assert difference_interval([(0, 0), (4, 2)], [(3, 2), (6, 2)], seed=0) == (1.0, 1.0, 1.0)


def test_interval_pools_instead_of_averaging_prompts() -> None:
    assert bootstrap_interval([(0, 1), (6, 3)] * 500, seed=0)[1] < 1 + 1.5 + 0.15
    assert bootstrap_interval([(0, 1), (6, 3)] * 500, seed=0)[0] > 1 + 1.5 - 0.15
    assert bootstrap_interval([(12, 4)], seed=0) == (4.0, 4.0)


def test_prompts_without_steps_do_not_count() -> None:
    pairs = [(3, 2), (5, 4), (1, 1)]
    assert bootstrap_interval([*pairs, (0, 0)], seed=2) == bootstrap_interval(pairs, seed=2)


@pytest.mark.parametrize("pairs", [[], [(0, 0)], [(1, 0)], [(-1, 3)], [(1, -3)]])
def test_interval_of_nothing_or_nonsense_is_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(DecodingError):
        bootstrap_interval(pairs, seed=0)


def test_senseless_level_or_resamples_are_refused() -> None:
    for level, resamples in ((0.0, 10), (1.0, 10), (0.9, 0)):
        with pytest.raises(DecodingError, match="level"):
            bootstrap_interval([(1, 1)], seed=0, level=level, resamples=resamples)


def test_run_is_cut_after_its_first_end_token() -> None:
    assert trim_at_end([5, 2, 9, 2], {2}) == ([5, 2], True)
    assert trim_at_end([5, 9, 2], frozenset({2, 9})) == ([5, 9], True)
    assert trim_at_end((5, 6), {2}) == ([5, 6], False)
    assert trim_at_end([], {2}) == ([], False)
    assert trim_at_end([2], [2]) == ([2], True)
