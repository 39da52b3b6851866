"""Where survivals come from: a calibrated head, or an estimator that learns while serving.

A calibration belongs to one way of sampling (rule, draft method, temperature), and so does what an
estimator learned: each *mode* has its own. Modes without a calibration use an estimator, which sees
the head's logit as one feature among others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.calibration import calibrated
from dspark.decoding.estimator import AcceptanceEstimator, Signals
from dspark.decoding.schedule import Floats, Ints, survivals
from dspark.decoding.verify import Rule
from dspark.model.heads import ConfidenceHead

# Temperatures are any number a user likes: the estimators least recently used are forgotten.
MOST_MODES = 32


class Mode(NamedTuple):
    """How a request samples, as far as acceptance depends on it."""

    rule: Rule
    one_hot: bool
    temperature: float


@dataclass
class Gauge:
    """Collects :class:`Signals` slot by slot while a block is drawn.

    ``whole`` asks for the distribution's features too; without them a slot costs one dot product.
    """

    confidence: ConfidenceHead
    whole: bool
    _head: list[Tensor] = field(default_factory=list)
    _top: list[Tensor] = field(default_factory=list)
    _spread: list[Tensor] = field(default_factory=list)

    def slot(self, states: Tensor, embedded: Tensor, logits: Tensor) -> None:
        """One slot, before its token is drawn: states [R, H], embedding of the token before it
        [R, r], the draft's logits [R, V']."""
        self._head.append(self.confidence(states, embedded).float())
        if self.whole:
            q = torch.softmax(logits.float(), -1)
            self._top.append(q.amax(-1).log())
            self._spread.append(-torch.linalg.vecdot(q, q).log())

    def signals(self, slots: int) -> Signals:
        """[R, slots] each; slots that were not drawn are 0."""
        head = _columns(self._head, slots)
        if not self.whole:
            return Signals(head)
        return Signals(head, _columns(self._top, slots), _columns(self._spread, slots))


class Confidence:
    """Survivals for blocks of ``slots`` slots; ``calibrations`` are temperatures by mode."""

    def __init__(self, slots: int, calibrations: Mapping[Mode, Sequence[float]]) -> None:
        self.slots = slots
        self.calibrations = dict(calibrations)
        self._estimators: OrderedDict[Mode, AcceptanceEstimator] = OrderedDict()

    def needs_features(self, modes: Sequence[Mode]) -> bool:
        """Whether some mode has no calibration."""
        return any(mode not in self.calibrations for mode in modes)

    def survival(self, signals: Signals, modes: Sequence[Mode]) -> Floats:
        """[R, slots] for blocks of these ``modes``, one a row.

        Without features (nothing is scheduled, blocks are only recorded) a mode that is not
        calibrated goes by the head as it is.
        """
        out = np.empty(signals.head.shape)
        features = None
        for mode, rows in _grouped(modes).items():
            if mode in self.calibrations or signals.top is None:
                logits = np.nan_to_num(signals.head[rows], nan=-50.0, posinf=50.0, neginf=-50.0)
                out[rows] = calibrated(logits, self.calibrations.get(mode, [1.0] * self.slots))
            else:
                features = signals.features() if features is None else features
                out[rows] = self.estimator(mode).predict(features[rows])
        return survivals(out)

    def learn(
        self, signals: Signals, modes: Sequence[Mode], admitted: Ints, accepted: Ints
    ) -> None:
        """Outcomes of the blocks that :meth:`survival` was asked about, [R] each."""
        if signals.top is None:
            return
        features = None
        for mode, rows in _grouped(modes).items():
            if mode not in self.calibrations:
                features = signals.features() if features is None else features
                self.estimator(mode).learn(features[rows], admitted[rows], accepted[rows])

    def estimator(self, mode: Mode) -> AcceptanceEstimator:
        """The one of ``mode``, made on first use."""
        if mode not in self._estimators:
            self._estimators[mode] = AcceptanceEstimator(self.slots)
            if len(self._estimators) > MOST_MODES:
                self._estimators.popitem(last=False)
        self._estimators.move_to_end(mode)
        return self._estimators[mode]


def _grouped(modes: Sequence[Mode]) -> dict[Mode, list[int]]:
    rows: dict[Mode, list[int]] = {}
    for row, mode in enumerate(modes):
        rows.setdefault(mode, []).append(row)
    return rows


def _columns(slots: list[Tensor], wanted: int) -> Floats:
    out = np.zeros((len(slots[0]), wanted))
    out[:, : len(slots)] = torch.stack(slots, 1).cpu().numpy()
    return out
