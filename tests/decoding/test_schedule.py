"""The schedulers against a loop that does what the paper says, and at the edges where they differ."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dspark.decoding import schedule
from dspark.errors import DecodingError

FLAT_THEN_CLIFF = np.array([0.0, 1.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9])


def random_survival(seed: int, requests: int, slots: int = 7) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    # Rounded, so that equal survivals occur.
    return schedule.survivals(np.round(numbers.beta(3, 1, (requests, slots)), 1))


def random_seconds(seed: int, most: int) -> np.ndarray:
    steps = np.random.default_rng([seed, 1]).exponential(size=most + 1) ** 2
    return 5.0 + np.cumsum(steps) * 0.3


def algorithm_1(survival: np.ndarray, seconds: np.ndarray) -> list[int]:
    """The paper's loop, one candidate at a time."""
    requests, slots = survival.shape
    order = sorted(
        ((r, k) for r in range(requests) for k in range(slots)),
        key=lambda rk: (-survival[rk], rk[1], rk[0]),
    )
    widths, tau, tokens = [0] * requests, float(requests), requests
    theta = tau / seconds[tokens]
    for r, k in order:
        after = (tau + survival[r, k]) / seconds[tokens + 1]
        if after <= theta:
            break
        assert widths[r] == k, "a slot was admitted before the one in front of it"
        widths[r], tau, tokens, theta = k + 1, tau + survival[r, k], tokens + 1, after
    return widths


@pytest.mark.parametrize("seed", range(40))
def test_sync_is_the_papers_loop(seed: int) -> None:
    survival = random_survival(seed, 1 + seed % 9)
    seconds = random_seconds(seed, 9 * 8)
    assert schedule.sync(survival, seconds).tolist() == algorithm_1(survival, seconds)


@pytest.mark.parametrize("seed", range(20))
def test_budget_is_the_best_count_of_all(seed: int) -> None:
    survival = random_survival(seed, 4)
    seconds = random_seconds(seed, 40)
    values = sorted(survival.ravel(), reverse=True)
    theta = [(4 + sum(values[:n])) / seconds[4 + n] for n in range(len(values) + 1)]
    count = schedule.budget(survival, seconds)
    assert theta[count] == pytest.approx(max(theta))
    widths = schedule.top(survival, count)
    assert widths.sum() == min(count, np.count_nonzero(survival))


def test_a_cliff_traps_sync_and_not_a_budget() -> None:
    survival = np.array([[0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5]])
    assert schedule.sync(survival, FLAT_THEN_CLIFF).tolist() == [0]
    assert schedule.budget(survival, FLAT_THEN_CLIFF) == 7


def test_load_shrinks_what_is_admitted() -> None:
    seconds = 1e-3 * np.sqrt(20.0**2 + (np.arange(4096 * 8 + 1) * 0.05) ** 2)
    admitted = [schedule.sync(random_survival(1, n), seconds).sum() / n for n in (8, 64, 512, 4096)]
    assert admitted == sorted(admitted, reverse=True)
    assert admitted[0] > 4 * admitted[-1] > 0


def test_equal_survivals_go_by_slot_then_by_request() -> None:
    survival = np.full((3, 2), 0.5)
    values, rows = schedule.ranked(survival)
    assert rows.tolist() == [0, 1, 2, 0, 1, 2]
    assert values.tolist() == [0.5] * 6
    assert schedule.top(survival, 4).tolist() == [2, 1, 1]


def test_slots_that_do_not_exist_are_never_admitted() -> None:
    survival = np.array([[0.9, 0.0, 0.0], [0.2, 0.1, 0.0]])
    assert schedule.top(survival, 6).tolist() == [1, 2]
    assert schedule.fixed(survival).tolist() == [1, 2]
    assert schedule.threshold(survival, 0.0).tolist() == [1, 2]
    assert schedule.threshold(survival, 0.15).tolist() == [1, 1]
    cheap = 1.0 + 1e-9 * np.arange(9)
    assert schedule.sync(survival, cheap).tolist() == [1, 2]


def test_counts_behind_the_end_of_the_costs_are_not_offered() -> None:
    survival = np.full((2, 3), 0.9)
    assert schedule.sync(survival, np.array([0.0, 1.0, 1.0, 1.0, 1.0])).sum() == 2
    assert schedule.budget(survival, np.array([0.0, 1.0, 1.0, 1.0])) == 1


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_survivals_that_are_no_probabilities_are_refused(bad: float) -> None:
    with pytest.raises(DecodingError, match="survivals"):
        schedule.sync(np.array([[0.5, bad]]), np.ones(9))


def test_drafting_is_left_out_for_requests_that_do_not_pay() -> None:
    good, poor = [0.9, 0.8, 0.7, 0.6], [0.1, 0.01, 0.0, 0.0]
    draft, verify = np.linspace(0.0, 0.4, 5), 1.0 + 0.1 * np.arange(25)
    worth = schedule.worth_drafting(
        np.array([good, poor, good]), draft, verify, tokens=3, emitted=3.0
    )
    assert worth.tolist() == [True, False, True]
    worth = schedule.worth_drafting(np.array([poor]), draft, verify, tokens=1, emitted=1.0)
    assert worth.tolist() == [False]


def test_a_gain_below_the_least_is_no_reason_to_draft() -> None:
    predicted, draft = np.array([[0.5, 0.25]]), np.array([0.0, 0.1])
    verify = np.array([0.0, 1.0, 1.35, 1.7])
    gain = 1.5 / 1.45 - 1
    for least, wanted in ((0.9 * gain, True), (1.1 * gain, False)):
        worth = schedule.worth_drafting(predicted, draft, verify, tokens=1, emitted=1.0, gain=least)
        assert worth.tolist() == [wanted]


@pytest.mark.slow
def test_512_requests_are_scheduled_in_200_microseconds() -> None:
    confidences = np.random.default_rng(0).beta(4, 1, (512, 7))
    seconds = 1e-3 * np.sqrt(20.0**2 + (np.arange(4097) * 0.05) ** 2)
    times = []
    for _ in range(500):
        started = time.perf_counter()
        schedule.sync(schedule.survivals(confidences), seconds)
        times.append(time.perf_counter() - started)
    assert min(times) < 200e-6
