"""Sequential temperature scaling on data whose miscalibration is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark.decoding.calibration import (
    auc,
    calibrated,
    expected_calibration_error,
    fit,
    reliability,
)
from dspark.decoding.estimator import sigmoid
from dspark.errors import DecodingError

TRUE = (2.5, 1.0, 0.5, 1.8)


def made(blocks: int, seed: int = 0, temperatures=TRUE) -> tuple[np.ndarray, np.ndarray]:
    """Logits that must be divided by ``temperatures`` to be right, and accepted counts."""
    numbers = np.random.default_rng(seed)
    right = numbers.normal(1.0, 1.5, (blocks, len(temperatures)))
    passed = numbers.uniform(size=right.shape) < sigmoid(right)
    return right * np.array(temperatures), np.cumprod(passed, axis=1).sum(axis=1)


def test_known_temperatures_are_found() -> None:
    fitted = fit(*made(40_000))
    assert fitted.temperatures == pytest.approx(TRUE, rel=0.15)
    assert max(slot.ece for slot in fitted.after) < 0.015
    assert fitted.before[0].ece > 0.05
    assert fitted.after[0].brier < fitted.before[0].brier
    assert fitted.blocks == 40_000


def test_a_calibrated_head_is_left_alone() -> None:
    fitted = fit(*made(40_000, temperatures=(1.0,) * 4))
    # Fewer blocks reach the later slots.
    assert fitted.temperatures[:2] == pytest.approx((1.0,) * 2, rel=0.12)
    assert fitted.temperatures == pytest.approx((1.0,) * 4, rel=0.4)


def test_the_order_of_confidences_is_kept() -> None:
    logits, accepted = made(2_000)
    after = calibrated(logits, fit(logits, accepted).temperatures)
    for slot in range(4):
        assert (np.argsort(logits[:, slot]) == np.argsort(after[:, slot])).all()


def test_the_first_slots_do_not_depend_on_the_later_ones() -> None:
    logits, accepted = made(3_000)
    short = fit(logits[:, :2], np.minimum(accepted, 2))
    assert fit(logits, accepted).temperatures[:2] == short.temperatures


def test_the_same_blocks_give_the_same_fit() -> None:
    assert fit(*made(1_000)) == fit(*made(1_000))


def test_figures_after_are_of_answers_that_were_not_fitted() -> None:
    """Pure noise: what is fitted on one half cannot help on the other."""
    after = seen = 0.0
    for seed in range(6):
        numbers = np.random.default_rng(seed)
        logits = numbers.normal(0, 3, (120, 4))
        accepted = np.cumprod(numbers.uniform(size=(120, 4)) < 0.5, axis=1).sum(1)
        fitted = fit(logits, accepted, np.arange(120) // 10)
        inside = np.cumprod(calibrated(logits, fitted.temperatures), axis=1)
        for slot in range(4):
            after += fitted.after[slot].ece
            seen += expected_calibration_error(inside[:, slot], accepted > slot)
    assert after > 1.1 * seen


def test_error_by_hand() -> None:
    predicted = np.array([0.02, 0.04, 0.52, 0.97, 1.0])
    outcome = np.array([False, True, True, True, True])
    first, second, last = reliability(predicted, outcome)
    assert (first.count, first.observed) == (2, 0.5)
    assert second.predicted == pytest.approx(0.52)
    assert last.count == 2
    assert expected_calibration_error(predicted, outcome) == pytest.approx(
        (2 * 0.47 + 0.48 + 2 * 0.015) / 5
    )


def test_area_counts_pairs_and_ties_half() -> None:
    predicted = np.round(np.random.default_rng(1).uniform(size=60), 1)
    outcome = np.random.default_rng(2).uniform(size=60) < predicted
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, b in itertools.product(predicted[outcome], predicted[~outcome])
    ]
    assert auc(predicted, outcome) == pytest.approx(np.mean(pairs))
    assert auc(predicted, np.ones(60, dtype=bool)) is None


@pytest.mark.parametrize(
    ("logits", "accepted"),
    [
        (np.zeros((20, 3)), np.zeros(20, dtype=int)),
        (np.zeros((80, 3)), np.full(80, 4)),
        (np.full((80, 3), np.nan), np.zeros(80, dtype=int)),
        (np.zeros((80, 3)), np.zeros(79, dtype=int)),
    ],
)
def test_data_that_fits_nothing_is_refused(logits, accepted) -> None:
    with pytest.raises(DecodingError, match="calibration"):
        fit(logits, accepted)
