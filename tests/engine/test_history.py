"""What earlier steps say of the next: hope that follows evidence, and losses that stay bounded."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark.engine.confidence import Mode
from dspark.engine.history import ALLOWED, DEAREST, SHARE, SHARED, Debt, Tally, Track


def test_a_mode_that_does_well_does_not_keep_up_hope_for_a_request_that_does_not() -> None:
    """Orders and sums share a mode: sums once drafted eighteen blocks in a row for nothing."""
    good = np.array([0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1])
    shared = Tally()
    for _ in range(64):
        shared.add(good, 7, 3, SHARED)
    track = Track(Mode("greedy", True, 0.0), "sync")
    hopeful = np.array([0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1])
    left = []
    for _ in range(5):
        track.add(hopeful, 7, 0)
        predicted = track.predict(shared)
        assert predicted is not None
        left.append(float(predicted.sum()))
    assert left[0] > 0.9, "one poor block does not make a poor request"
    assert left[3] < 0.5, "four do"


@given(st.lists(st.floats(-3.0, DEAREST), min_size=1, max_size=60), st.integers(1, 64))
def test_drafting_never_loses_more_than_its_share_and_what_it_may_owe(
    losses: list[float], requests: int
) -> None:
    """Draft whenever it is allowed, for 2000 steps, each time losing the next of ``losses``."""
    debt, turn, lost, rested = Debt(), itertools.cycle(losses), 0.0, 0
    for _ in range(2000):
        if debt.rest(requests):
            debt.pay(requests)
            rested += 1
        else:
            step = next(turn)
            debt.add(requests, step)
            lost += step
        assert lost <= ALLOWED + DEAREST + SHARE * rested + 1e-9
    assert debt.rest(2 * requests) == 0, "another number of requests is another question"


def test_a_debt_rests_for_a_known_time_and_gains_end_it_at_once() -> None:
    debt = Debt()
    while not debt.rest(32):
        debt.add(32, 0.6)
    wanted = debt.rest(33)  # the same size, to a factor of two
    for _ in range(wanted):
        assert debt.rest(32)
        debt.pay(32)
    assert not debt.rest(32)
    debt.add(32, 1000.0)
    assert debt.rest(32) <= DEAREST / SHARE, "one slow step is no verdict"
    debt.add(32, -2.0)
    assert not debt.rest(32)
