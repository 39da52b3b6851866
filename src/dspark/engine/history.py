"""What earlier steps say of a request: how much of its next block would survive, and is it due for
another try.

Everything here is past: nothing of the block that is being drawn. So it may decide anything
(whether to draft, how many tokens to admit in all) without touching exactness.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dspark.decoding.params import SchedulerName
from dspark.decoding.schedule import Floats
from dspark.engine.confidence import Mode

# Weight of the newest block in a request's own mean, and in that of its mode.
OWN, SHARED = 0.3, 0.03
# Blocks after which accepted and predicted tokens count half.
FADE = 0.85
# Tokens of doubt: how much evidence moves the ratio of accepted to predicted from its mode's.
DOUBT = 3.0
# Steps without drafting before a request is tried again; doubled after each try in vain.
FIRST_WAIT, MOST_WAIT = 8, 64


@dataclass
class Tally:
    """Survivals and outcomes of blocks seen so far, newest first in weight."""

    mean: Floats | None = None
    expected: float = 0.0
    accepted: float = 0.0

    def add(self, survival: Floats, admitted: int, accepted: int, weight: float) -> None:
        """One block [K]; ``admitted`` of its slots were verified."""
        if self.mean is None:
            self.mean = survival.copy()
        else:
            self.mean += weight * (survival - self.mean)
        fade = FADE if weight >= OWN else 1 - SHARED
        self.expected = fade * self.expected + float(survival[:admitted].sum())
        self.accepted = fade * self.accepted + accepted


@dataclass
class Track:
    """One request. ``recent`` holds the survivals of its last two blocks, the older one first;
    ``idle`` counts steps since it last drafted."""

    mode: Mode
    scheduler: SchedulerName
    own: Tally = field(default_factory=Tally)
    recent: deque[Floats] = field(default_factory=lambda: deque(maxlen=2))
    idle: int = 0
    wait: int = FIRST_WAIT
    drafts: bool = True
    probing: bool = False

    def predict(self, shared: Tally) -> Floats | None:
        """Survivals [K] of its next block, None before its first; ``shared`` is its mode's tally,
        whose bias it has until it has shown its own."""
        if self.own.mean is None:
            return None
        common = (shared.accepted + DOUBT) / (shared.expected + DOUBT)
        ratio = (self.own.accepted + DOUBT * common) / (self.own.expected + DOUBT)
        return np.clip(self.own.mean * ratio, 0.0, 1.0)

    def first(self) -> None:
        """Nothing is known of it: one block costs little and tells much."""
        self.drafts = self.probing = True

    def decide(self, worth: bool) -> None:
        """Draft next, or wait: ``worth`` says what the prediction says."""
        if worth:
            self.drafts, self.probing, self.wait = True, False, FIRST_WAIT
            return
        if self.probing:
            self.wait = min(2 * self.wait, MOST_WAIT)
        self.drafts = self.probing = self.idle >= self.wait
        self.idle += 1

    def add(self, survival: Floats, admitted: int, accepted: int) -> None:
        """It drafted a block."""
        # After a long wait, what was known before is worth less.
        self.own.add(survival, admitted, accepted, 0.6 if self.idle >= FIRST_WAIT else OWN)
        self.recent.append(survival)
        self.idle = 0
