"""What earlier steps say of a request: how much of its next block would survive, and is it due for
another try.

Everything here is past: nothing of the block that is being drawn. So it may decide anything
(whether to draft, how many tokens to admit in all) without touching exactness.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
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
DOUBT = 1.5
# Blocks of its mode that a request's own are weighed against. Its first block says more of it than
# all others of its mode: they may be of another kind of text.
PRIOR_BLOCKS = 0.5
# Blocks that a mode learns from, all drafted and all verified, before anything is left out.
LEAST_BLOCKS = 32
# Steps without drafting before a request is tried again; doubled after each try in vain.
FIRST_WAIT, MOST_WAIT = 4, 64
# Share of the time that drafting which loses may take on average.
SHARE = 0.01
# Plain steps that drafting may have lost before it is left, and may be ahead: what it gained long
# ago says little of now. One step counts for no more than ``DEAREST``: a machine may stumble.
ALLOWED, AHEAD, DEAREST = 2.0, 1.0, 1.5


@dataclass
class Tally:
    """Survivals and outcomes of blocks seen so far, newest first in weight."""

    mean: Floats | None = None
    blocks: int = 0
    expected: float = 0.0
    accepted: float = 0.0

    @property
    def young(self) -> bool:
        """Too few blocks to leave anything out."""
        return self.blocks < LEAST_BLOCKS

    def add(self, survival: Floats, admitted: int, accepted: int, weight: float) -> None:
        """One block [K]; ``admitted`` of its slots were verified."""
        self.blocks += 1
        if self.mean is None:
            self.mean = survival.copy()
        else:
            # The first blocks count alike.
            self.mean += max(weight, 1 / self.blocks) * (survival - self.mean)
        fade = FADE if weight >= OWN else 1 - SHARED
        self.expected = fade * self.expected + float(survival[:admitted].sum())
        self.accepted = fade * self.accepted + accepted


@dataclass
class Debt:
    """What drafting lost against plain decoding so far, in plain steps, less what it gained.

    Whatever was promised, and whether it was hoped to pay or merely tried: when too much is owed,
    nobody drafts until plain steps paid it back, each ``SHARE`` of a step. Kept by the number of
    requests, to a factor of two: what pays for one may not for thirty.
    """

    owed: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, requests: int, lost: float) -> None:
        """A step of ``requests``, some of which drafted, took ``lost`` plain steps more than its
        tokens would have without a draft."""
        size = requests.bit_length()
        owed = max(self.owed[size] + min(lost, DEAREST), -AHEAD)
        # Some draft whatever is owed: the first blocks of a mode.
        self.owed[size] = min(owed, ALLOWED + DEAREST)

    def pay(self, requests: int) -> None:
        """A step in which nobody drafted."""
        size = requests.bit_length()
        if self.owed[size] > 0.0:
            self.owed[size] = max(self.owed[size] - SHARE, 0.0)

    def rest(self, requests: int) -> int:
        """Steps of ``requests`` until drafting is allowed; 0: it is."""
        steps = (self.owed[requests.bit_length()] - ALLOWED) / SHARE
        return max(math.ceil(steps - 1e-6), 0)


@dataclass
class Track:
    """One request. ``recent`` holds the survivals of its last two blocks, the older one first;
    ``idle`` counts steps since it last drafted, ``pays`` says that it was weighed and should,
    ``due`` after how many steps it is tried again, ``missed`` the blocks in a row of which nothing
    was accepted."""

    mode: Mode
    scheduler: SchedulerName
    own: Tally = field(default_factory=Tally)
    recent: deque[Floats] = field(default_factory=lambda: deque(maxlen=2))
    idle: int = 0
    wait: int = FIRST_WAIT
    drafts: bool = True
    probing: bool = False
    pays: bool = False
    due: int = 0
    missed: int = 0

    def predict(self, shared: Tally) -> Floats | None:
        """Survivals [K] of its next block, None before its first or while ``shared``, the tally of
        its mode, is young. What is common to the mode counts until it has shown its own: one poor
        block does not make a poor request."""
        if self.own.mean is None or shared.mean is None or shared.young:
            return None
        common = (shared.accepted + DOUBT) / (shared.expected + DOUBT)
        ratio = (self.own.accepted + DOUBT * common) / (self.own.expected + DOUBT)
        own = self.own.blocks / (self.own.blocks + PRIOR_BLOCKS)
        mean = own * self.own.mean + (1 - own) * shared.mean
        return np.clip(mean * ratio, 0.0, 1.0)

    def first(self, shared: Tally) -> None:
        """Nothing is known of it: one block costs little and tells much."""
        self.drafts, self.probing, self.pays = True, not shared.young, False

    def pause(self, rest: int) -> None:
        """Nobody drafts for ``rest`` steps."""
        self._doubt()
        self.drafts = self.probing = self.pays = False
        self.due = rest
        self.idle += 1

    def decide(self, worth: bool) -> None:
        """Draft next, or wait: ``worth`` is what is predicted."""
        self.pays = worth
        if worth:
            self.drafts, self.probing, self.wait = True, False, FIRST_WAIT
            return
        self._doubt()
        self.due = self.wait - self.idle
        self.drafts = self.probing = self.due <= 0
        self.idle += 1

    def _doubt(self) -> None:
        """If it was tried, that was in vain: the next try is further off."""
        if self.probing:
            self.wait = min(2 * self.wait, MOST_WAIT)

    def rest(self) -> None:
        """A step without drafting that nobody weighed."""
        self.due, self.idle = self.due - 1, self.idle + 1

    def add(self, survival: Floats, admitted: int, accepted: int) -> None:
        """It drafted a block."""
        # After a long wait, what was known before is worth less.
        self.own.add(survival, admitted, accepted, 0.6 if self.idle >= FIRST_WAIT else OWN)
        self.recent.append(survival)
        self.idle = 0
