"""Sequential temperature scaling: making a confidence head's products mean what they say.

A scheduler spends time on survivals a_k = c_1 ... c_k. Heads are trained to rank well and are
usually too sure, and errors multiply along the block. So each slot gets one temperature,
c_k = sigma(logit_k / T_k), fitted from left to right: T_k minimises the expected calibration error
of the PRODUCT up to k with all earlier temperatures frozen (paper, section 3.2; there 3 to 8 % fall
to about 1 %). Dividing a logit by a positive number keeps the order of any two confidences of one
slot. The search is over a fixed grid in log T, then a finer one around its best, so the same data
give the same numbers anywhere.

What is measured, per slot, before and after: ECE over 20 bins of equal width, AUC (a rank statistic
with ties counted half), and the Brier score, of a_k against "at least k tokens were accepted". The
figures after are of blocks that the temperatures applied to them were not fitted to: each half of
the answers is judged with the fit of the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.decoding.estimator import sigmoid
from dspark.decoding.schedule import Bools, Floats, Ints, survivals
from dspark.errors import DecodingError

BINS = 20
# Below this many blocks a temperature is fitted to noise.
LEAST_BLOCKS = 50
_COARSE = np.exp(np.linspace(np.log(0.1), np.log(10.0), 121))


@dataclass(frozen=True)
class SlotReport:
    """Of one slot's survival; ``auc`` is None when all outcomes are equal."""

    ece: float
    auc: float | None
    brier: float


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram: ``count`` survivals of mean ``predicted``, of which a share
    ``observed`` came true."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class Fit:
    """``temperatures`` [K] and what they change; ``reliability`` pools all slots."""

    temperatures: tuple[float, ...]
    blocks: int
    before: tuple[SlotReport, ...]
    after: tuple[SlotReport, ...]
    reliability_before: tuple[Bin, ...]
    reliability_after: tuple[Bin, ...]


def expected_calibration_error(predicted: Floats, outcome: Bools, bins: int = BINS) -> float:
    """Mean over bins of equal width of |mean prediction - share that came true|, by their size."""
    return sum(
        b.count * abs(b.predicted - b.observed) for b in reliability(predicted, outcome, bins)
    ) / max(len(predicted), 1)


def reliability(predicted: Floats, outcome: Bools, bins: int = BINS) -> list[Bin]:
    """The bins that are not empty, in order."""
    at = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(at, minlength=bins)
    mean = np.bincount(at, predicted, bins)
    true = np.bincount(at, outcome.astype(np.float64), bins)
    return [
        Bin(float(mean[i] / count[i]), float(true[i] / count[i]), int(count[i]))
        for i in np.flatnonzero(count)
    ]


def auc(predicted: Floats, outcome: Bools) -> float | None:
    """Chance that something that came true had the higher prediction; None without both kinds."""
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return None
    _, place, count = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2.0)[place]
    return float((ranks[outcome].sum() - positives * (positives + 1) / 2) / positives / negatives)


def calibrated(logits: Floats, temperatures: Sequence[float]) -> Floats:
    """Confidences [R, K] of head ``logits`` [R, K]."""
    return sigmoid(logits / np.asarray(temperatures, dtype=np.float64))


def fit(logits: Floats, accepted: Ints, answers: Ints | None = None) -> Fit:
    """Fit temperatures to blocks that were verified whole.

    Args:
        logits: [N, K] of the confidence head.
        accepted: [N] drafted tokens that were accepted, 0 .. K.
        answers: [N] number of the answer that a block belongs to; each its own when left out.

    Raises:
        DecodingError: fewer than ``LEAST_BLOCKS`` blocks, shapes that differ, non-finite logits.
    """
    _check(logits, accepted)
    reached = accepted[:, None] > np.arange(logits.shape[1])
    raw = survivals(sigmoid(logits))
    scaled = np.empty_like(raw)
    second = (np.arange(len(logits)) if answers is None else answers) % 2 == 1
    for half in (second, ~second):
        scaled[half] = survivals(calibrated(logits[half], _temperatures(logits, reached, ~half)))
    return Fit(
        tuple(_temperatures(logits, reached, np.ones_like(second))),
        len(logits),
        slot_reports(raw, reached),
        slot_reports(scaled, reached),
        tuple(reliability(raw.ravel(), reached.ravel())),
        tuple(reliability(scaled.ravel(), reached.ravel())),
    )


def slot_reports(survival: Floats, reached: Bools) -> tuple[SlotReport, ...]:
    """Figures of every slot of ``survival`` [N, K] against ``reached`` [N, K]."""
    return tuple(
        SlotReport(
            expected_calibration_error(a, y), auc(a, y), float(((a - y.astype(float)) ** 2).mean())
        )
        for a, y in zip(survival.T, reached.T, strict=True)
    )


def _temperatures(logits: Floats, reached: Bools, rows: Bools) -> list[float]:
    """Fitted to ``rows``, slot after slot."""
    temperatures: list[float] = []
    product = np.ones(int(rows.sum()))
    for own, came in zip(logits[rows].T, reached[rows].T, strict=True):
        temperatures.append(_search(own, product, came))
        product = product * sigmoid(own / temperatures[-1])
    return temperatures


def _search(logits: Floats, product: Floats, reached: Bools) -> float:
    """The temperature of least error; among equals the one nearest to 1."""

    def error(temperature: float) -> tuple[float, float]:
        predicted = product * sigmoid(logits / temperature)
        return expected_calibration_error(predicted, reached), abs(np.log(temperature))

    best = min(_COARSE.tolist(), key=error)
    width = np.log(_COARSE[1] / _COARSE[0])
    fine = best * np.exp(np.linspace(-width, width, 41))
    return float(min([1.0, best, *fine.tolist()], key=error))


def _check(logits: Floats, accepted: Ints) -> None:
    found = None
    if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
        found = f"logits {logits.shape}, accepted {accepted.shape}"
    elif len(logits) < LEAST_BLOCKS:
        found = f"{len(logits)} blocks"
    elif not np.isfinite(logits).all():
        found = "logits that are not finite"
    elif accepted.min() < 0 or accepted.max() > logits.shape[1]:
        found = f"accepted from {accepted.min()} to {accepted.max()}"
    if found is not None:
        raise DecodingError(
            expected=f"at least {LEAST_BLOCKS} blocks of finite logits [N, K], 0 to K accepted",
            found=found,
            where="calibration",
            fix="Give it more or longer answers, and whole blocks.",
        )
