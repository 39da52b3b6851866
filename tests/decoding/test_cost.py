"""Cost curves: monotone whatever was measured, and following what real steps take."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.decoding.cost import CostTable, Curve, isotonic
from dspark.errors import DecodingError


def table(**options) -> CostTable:
    return CostTable(
        Curve((1, 4), (0.002, 0.003)), Curve((1, 8, 16), (0.01, 0.02, 0.04)), **options
    )


def test_isotonic_is_the_nearest_rising_sequence() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([5.0, 1.0, 3.0]) == [3.0, 3.0, 3.0]
    numbers = np.random.default_rng(0)
    for _ in range(20):
        values = numbers.normal(size=8).tolist()
        best = np.array(isotonic(values))
        assert (np.diff(best) >= 0).all()
        for _ in range(50):
            other = np.sort(numbers.normal(size=8))
            assert ((best - values) ** 2).sum() <= ((other - values) ** 2).sum()


def test_curves_interpolate_and_go_on_by_their_last_slope() -> None:
    dense = table().verify_seconds(24)
    assert dense[[0, 1, 8, 16]].tolist() == [0.0, 0.01, 0.02, 0.04]
    assert dense[12] == pytest.approx(0.03)
    assert dense[24] == pytest.approx(0.06)
    assert (np.diff(dense) >= 0).all()


def test_a_dip_that_noise_made_is_levelled() -> None:
    curve = Curve((1, 2, 3), (0.03, 0.01, 0.05))
    assert curve.seconds == (0.02, 0.02, 0.05)


def test_real_steps_move_the_curve_towards_themselves_most_where_they_are() -> None:
    costs = table()
    before = costs.verify_seconds(16).copy()
    for _ in range(60):
        costs.observe(2, 0.005, 8, 0.03)
    after = costs.verify_seconds(16)
    assert after[8] == pytest.approx(0.03, rel=0.02)
    assert after[16] / before[16] < 1.49
    assert costs.draft_seconds(2)[2] == pytest.approx(0.005, rel=0.05)
    assert (np.diff(after) >= 0).all()
    assert costs.observed == 60


def test_a_cold_step_is_soon_forgotten_and_a_lasting_change_soon_followed() -> None:
    """A size whose first step was slow (its kernels were made) must not look dear for good."""
    costs = CostTable(Curve((1,), (0.004,)), Curve((1, 64), (0.02, 0.08)))
    costs.observe(0, 0.0, 64, 0.8)
    assert costs.verify_seconds(64)[64] < 0.08 * 1.04
    for _ in range(40):
        costs.observe(0, 0.0, 64, 0.08 * 1.5)
    assert costs.verify_seconds(64)[64] == pytest.approx(0.08 * 1.5, rel=0.05)
    for _ in range(40):
        costs.observe(0, 0.0, 64, 0.08)
    assert costs.verify_seconds(64)[64] == pytest.approx(0.08, rel=0.05)


def test_a_table_made_while_the_machine_was_busy_is_put_right_by_the_first_steps() -> None:
    """As it was saved on a machine that another program had for itself while 8 tokens were timed."""
    verify = Curve((1, 2, 4, 5, 6, 7, 8), (0.075, 0.173, 0.173, 1.28, 2.39, 3.49, 4.6))
    costs = CostTable(Curve((1,), (0.232,)), verify)
    for _ in range(32):
        costs.observe(1, 0.004, 8, 0.039)
    for _ in range(16):
        costs.observe(0, 0.0, 1, 0.036)
    seconds = costs.verify_seconds(8)
    assert seconds[8] == pytest.approx(0.039, rel=0.1)
    assert seconds[1] == pytest.approx(0.036, rel=0.15)
    assert (np.diff(seconds[1:]) >= 0).all()
    assert costs.draft_seconds(1)[1] == pytest.approx(0.004, rel=0.1)


def test_one_disturbed_step_moves_little_and_a_frozen_table_nothing() -> None:
    costs = table()
    costs.observe(0, 0.0, 8, 5.0)
    assert costs.verify_seconds(8)[8] < 0.02 * 1.15
    frozen = table(frozen=True)
    frozen.observe(2, 1.0, 8, 5.0)
    assert frozen.as_json() == table().as_json()


def test_json_gives_the_same_table_back() -> None:
    costs = table()
    assert CostTable.from_json(costs.as_json()) == costs


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"draft": [[1, 0.1]], "verify": [[2, 0.1], [1, 0.2]]},
        {"draft": [[1, 0.1]], "verify": [[1, float("nan")]]},
        {"draft": [[1, 0.1]], "verify": [[1, 0.0]]},
        {"draft": [[1, 0.1]], "verify": []},
        {"draft": [[1, 0.1]], "verify": [["one", 0.1]]},
    ],
)
def test_tables_that_are_none_are_refused(raw) -> None:
    with pytest.raises(DecodingError, match="cost table"):
        CostTable.from_json(raw)
