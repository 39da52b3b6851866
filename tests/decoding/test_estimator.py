"""The online estimator finds what is there to find, from features that know no drawn token."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.decoding.estimator import AcceptanceEstimator, Signals, sigmoid

SLOTS = 5
BIAS = np.array([0.5, 0.2, 0.0, -0.3, -0.6])
WEIGHTS = np.array([0.9, -0.4, 0.3])


def made(blocks: int, seed: int) -> tuple[Signals, np.ndarray, np.ndarray]:
    """Signals, chances [N, K] and accepted counts of blocks that obey BIAS and WEIGHTS."""
    numbers = np.random.default_rng(seed)
    top = -numbers.exponential(0.7, (blocks, SLOTS)) - 1e-3
    spread = numbers.exponential(0.5, (blocks, SLOTS))
    signals = Signals(numbers.normal(size=(blocks, SLOTS)), top, spread)
    chance = sigmoid(BIAS + signals.features @ WEIGHTS)
    passed = numbers.uniform(size=chance.shape) < chance
    return signals, chance, np.cumprod(passed, axis=1).sum(axis=1)


def learned(blocks: int, batch: int, width: int = SLOTS) -> AcceptanceEstimator:
    estimator = AcceptanceEstimator(SLOTS)
    for seed in range(blocks // batch):
        signals, _, accepted = made(batch, seed)
        admitted = np.full(batch, width)
        estimator.learn(signals.features, admitted, np.minimum(accepted, width))
    return estimator


@pytest.mark.parametrize("batch", [1, 16])
def test_chances_are_found_from_outcomes_alone(batch: int) -> None:
    signals, chance, _ = made(2000, 9999)
    error = [
        np.abs(e.predict(signals.features) - chance).mean()
        for e in (AcceptanceEstimator(SLOTS), learned(400, batch), learned(2000, batch))
    ]
    assert error[2] < 0.06
    assert error[1] < 0.8 * error[0]


def test_narrow_blocks_teach_the_slots_they_have_without_bias() -> None:
    signals, chance, _ = made(2000, 9999)
    found = learned(3000, 10, width=2).predict(signals.features)
    assert np.abs(found - chance)[:, :2].mean() < 0.05


def test_a_change_of_the_workload_is_followed() -> None:
    estimator = learned(2000, 10)
    signals, _, _ = made(500, 1)
    for start in range(0, 500, 10):
        part = slice(start, start + 10)
        features = signals.features[part]
        estimator.learn(features, np.full(10, SLOTS), np.zeros(10, dtype=int))
    assert estimator.predict(signals.features)[:, 0].mean() < 0.2


def test_signals_that_are_not_finite_do_no_harm() -> None:
    bad = np.array([[np.nan, np.inf, -np.inf, 0.0, -1.0]])
    signals = Signals(bad, np.array([[0.0, -np.inf, np.nan, -0.1, -2.0]]), bad)
    estimator = AcceptanceEstimator(SLOTS)
    estimator.learn(signals.features, np.array([5]), np.array([3]))
    found = estimator.predict(signals.features)
    assert np.isfinite(found).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_blocks_without_admitted_slots_teach_nothing() -> None:
    estimator = AcceptanceEstimator(SLOTS)
    before = estimator.weights.copy()
    signals, _, _ = made(4, 0)
    estimator.learn(signals.features, np.zeros(4, dtype=int), np.zeros(4, dtype=int))
    assert (estimator.weights == before).all()
    assert estimator.blocks == 0
