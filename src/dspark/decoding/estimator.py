"""Acceptance predicted from the draft's own distribution, learned while serving.

A published draft may have no confidence head, an untrained one, or one that nobody calibrated for
this sampling mode. Scheduling then uses logistic regression on what every draft has: the slot, how
sure the draft is (log-odds of its most likely token), how spread out it is (Renyi entropy of order
2), and the head's logit where there is one, whatever it is worth. None of these looks at the token
that was drawn for the slot, so a width made from them is as exact as one from a confidence head.

Outcomes arrive only for admitted slots up to the first rejection: exactly the conditional that is
predicted. The fit is Newton's method one step at a time, with the curvature of everything seen,
slowly forgotten; eleven numbers settle within a few dozen blocks. It starts from a prior in which
the draft's log-odds count and nothing else does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dspark.decoding.schedule import Bools, Floats, Ints

# Log-odds of 1 - 1e-4: a draft that is surer than this is not believed any more.
CLIP = 9.0
FORGET = 0.996
FEATURES = ("top_odds", "spread", "head")
# Blocks after which outcomes are gathered from so many steps before they are fitted: the weights
# hardly move any more, and a fit takes longer than the rest of a step's bookkeeping.
SETTLED, GATHERED = 64, 4


@dataclass(frozen=True)
class Signals:
    """What a draft says of its slots, each [R, K]: ``top`` log-probability of the most likely
    token, ``spread`` -log(sum q^2), ``head`` logit of the confidence head. All before the slot's
    own token is drawn. ``top`` and ``spread`` are None when only the head was asked."""

    head: Floats
    top: Floats | None = None
    spread: Floats | None = None

    @cached_property
    def features(self) -> Floats:
        """[R, K, 3], bounded; non-finite values become 0. Asked for twice a step."""
        assert self.top is not None
        assert self.spread is not None
        out = np.empty((*self.head.shape, len(FEATURES)))
        rest = np.log(-np.expm1(np.minimum(self.top, -1e-9)))
        for i, (raw, least) in enumerate(
            ((self.top - rest, -CLIP), (self.spread, 0.0), (self.head, -CLIP))
        ):
            np.minimum(np.maximum(raw, least), CLIP, out=out[..., i])
        if not math.isfinite(float(out.sum())):  # NaN: infinities are bounded already
            out[np.isnan(out)] = 0.0
        return out


@dataclass
class AcceptanceEstimator:
    """Predicts for blocks of ``slots`` slots; ``weights`` [slots + 3] are slot biases and features.

    ``blocks`` counts those with an admitted slot, which teach something.
    """

    slots: int
    blocks: int = 0
    weights: Floats = field(init=False)
    _curvature: Floats = field(init=False)
    _waiting: list[tuple[Floats, Ints, Ints]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.slots + len(FEATURES)
        self.weights = np.zeros(size)
        self.weights[self.slots] = 0.7
        # Slot biases may move at once, features need evidence, the head's most of all.
        self._curvature = np.diag([*[0.5] * self.slots, 4.0, 4.0, 20.0])

    def predict(self, features: Floats) -> Floats:
        """Confidences [R, K] of ``features`` [R, K, 3]: accepted, given that all before were."""
        logits = self.weights[: self.slots] + features @ self.weights[self.slots :]
        return sigmoid(logits)

    def learn(self, features: Floats, admitted: Ints, accepted: Ints) -> None:
        """Outcomes of blocks: ``features`` [R, K, 3], counts ``admitted`` and ``accepted`` [R].

        Slots behind the first rejection, and slots that were not admitted, teach nothing.
        """
        self.blocks += int(np.count_nonzero(admitted))
        self._waiting.append((features, admitted, accepted))
        if self.blocks < SETTLED or len(self._waiting) == GATHERED:
            self._fit(*map(np.concatenate, zip(*self._waiting, strict=True)))
            self._waiting.clear()

    def _fit(self, features: Floats, admitted: Ints, accepted: Ints) -> None:
        slot = np.arange(self.slots)
        seen: Bools = slot < np.minimum(admitted, accepted + 1)[:, None]
        if not seen.any():
            return
        outcome = (slot < accepted[:, None])[seen].astype(np.float64)
        rows, at = np.nonzero(seen)
        design = np.zeros((len(at), len(self.weights)))
        design[np.arange(len(at)), at] = 1.0
        design[:, self.slots :] = features[rows, at]
        chance = sigmoid(design @ self.weights)
        # Old evidence fades, the prior's own share with it, but never below a tenth.
        floor = np.diag([*[0.05] * self.slots, 0.4, 0.4, 2.0])
        kept = FORGET ** len(seen)
        self._curvature = kept * self._curvature + (1 - kept) * floor
        self._curvature += design.T @ (design * (chance * (1 - chance))[:, None])
        step = np.linalg.solve(self._curvature, design.T @ (outcome - chance))
        self.weights = self.weights + np.clip(step, -1.0, 1.0)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x) without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
