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
# Logits of one slot (all requests) that are kept until the block is drawn.
KEPT = 1 << 18


class Mode(NamedTuple):
    """How a request samples, as far as acceptance depends on it."""

    rule: Rule
    one_hot: bool
    temperature: float


@dataclass
class Gauge:
    """Collects :class:`Signals` slot by slot while a block is drawn.

    ``whole`` asks for the distribution's features too; without them a slot costs one dot product.
    Small rows of logits are kept and worked on together: at batch 1 that is a third of the time.
    """

    confidence: ConfidenceHead
    whole: bool
    _states: list[Tensor] = field(default_factory=list)
    _embedded: list[Tensor] = field(default_factory=list)
    _logits: list[Tensor] = field(default_factory=list)
    _features: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def slot(self, states: Tensor, embedded: Tensor, logits: Tensor) -> None:
        """One slot, before its token is drawn: states [R, H], embedding of the token before it
        [R, r], the draft's logits [R, V']."""
        self._states.append(states)
        self._embedded.append(embedded)
        if self.whole and logits.numel() <= KEPT:
            self._logits.append(logits)
        elif self.whole:
            self._features.append(_features(logits))

    def signals(self, slots: int) -> Signals:
        """[R, slots] each; slots that were not drawn are 0."""
        states, embedded = torch.stack(self._states, 1), torch.stack(self._embedded, 1)
        head = _columns(self.confidence(states, embedded).float(), slots)
        if not self.whole:
            return Signals(head)
        if self._logits:
            top, spread = _features(torch.stack(self._logits, 1))
        else:
            top, spread = (torch.stack(part, 1) for part in zip(*self._features, strict=True))
        return Signals(head, _columns(top, slots), _columns(spread, slots))


class Confidence:
    """Survivals for blocks of ``slots`` slots; ``calibrations`` are temperatures by mode."""

    def __init__(self, slots: int, calibrations: Mapping[Mode, Sequence[float]]) -> None:
        self.slots = slots
        self.calibrations = dict(calibrations)
        self._estimators: OrderedDict[Mode, AcceptanceEstimator] = OrderedDict()

    def mode(self, exact: Mode) -> Mode:
        """What a request is counted under: its own mode where that is calibrated, or else that of
        the nearest tenth, or users' odd temperatures would each be learned anew."""
        if exact in self.calibrations:
            return exact
        return exact._replace(temperature=round(exact.temperature, 1))

    def needs_features(self, modes: Sequence[Mode]) -> bool:
        """Whether some mode has no calibration."""
        return any(mode not in self.calibrations for mode in modes)

    def survival(self, signals: Signals, modes: Sequence[Mode]) -> Floats:
        """[R, slots] for blocks of these ``modes``, one a row.

        Without features (nothing is scheduled, blocks are only recorded) a mode that is not
        calibrated goes by the head as it is.
        """
        out = np.empty(signals.head.shape)
        for mode, rows in _grouped(modes).items():
            if mode in self.calibrations or signals.top is None:
                logits = np.nan_to_num(signals.head[rows], nan=-50.0, posinf=50.0, neginf=-50.0)
                out[rows] = calibrated(logits, self.calibrations.get(mode, [1.0] * self.slots))
            else:
                out[rows] = self.estimator(mode).predict(signals.features[rows])
        return survivals(out)

    def learn(
        self, signals: Signals, modes: Sequence[Mode], admitted: Ints, accepted: Ints
    ) -> None:
        """Outcomes of the blocks that :meth:`survival` was asked about, [R] each."""
        if signals.top is None:
            return
        for mode, rows in _grouped(modes).items():
            if mode not in self.calibrations:
                own = signals.features[rows]
                self.estimator(mode).learn(own, admitted[rows], accepted[rows])

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


def _features(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the most likely token and -log(sum q^2), [..] of ``logits`` [.., V']."""
    q = torch.softmax(logits.float(), -1)
    return q.amax(-1).log(), -torch.linalg.vecdot(q, q).log()


def _columns(slots: Tensor, wanted: int) -> Floats:
    """[R, k] as [R, wanted], zeros behind."""
    out = np.zeros((len(slots), wanted))
    out[:, : slots.shape[1]] = slots.cpu().numpy()
    return out
