"""What a step costs in seconds: drafting by requests, everything else by verified tokens.

Two measured curves, kept at a few knots and interpolated between them: ``draft`` by the number of
requests that draft, ``verify`` by the number of tokens in the target's forward (anchors included),
with everything that belongs to it: logits, verification, context rows. Beyond the last knot its
slope goes on.

Both are made monotone (isotonic regression, pool adjacent violators): a larger batch is never
cheaper, and a dip that noise made would draw every step into it. Flat stretches and cliffs stay.

Real steps correct the curves (:meth:`CostTable.observe`): knots move towards what was seen by an
exponential average in the logarithm, those beside the seen count most, and all of them a little,
because most changes (a longer context, a busy machine) touch every size of step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.decoding.schedule import Floats
from dspark.errors import DecodingError

# One step moves the knots at its own size by this share of the (logarithmic) difference ..
NEAR = 0.15
# .. and every other knot by this share.
FAR = 0.1
# A slower step moves the curve no further than this ratio would: disturbances only make it longer
# (the first step of a size also makes its kernels), and a size that is then avoided is not seen
# again. One that is faster than the other ratio proves its size wrong, and smaller ones that are
# said to take longer; of larger ones it says nothing.
SLOWER, FASTER = 1.25, 0.5


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` (weighted least squares)."""
    pools: list[list[float]] = []  # [mean, weight, members]
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, mass, members = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * mass) / (last[1] + mass)
            last[1] += mass
            last[2] += members
    return [pool[0] for pool in pools for _ in range(int(pool[2]))]


@dataclass
class Curve:
    """Positive ``seconds`` at rising counts ``at`` (>= 1); monotone.

    Raises:
        DecodingError: no knot, counts out of order, or times that are not positive and finite.
    """

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        sound = all(math.isfinite(s) and s > 0 for s in self.seconds)
        if not self.at or len(self.at) != len(self.seconds) or self.at[0] < 1 or not rising:
            raise _error("one time for each of some rising counts >= 1", f"counts {self.at}")
        if not sound:
            raise _error("positive, finite seconds", f"{self.seconds}")
        self.seconds = tuple(isotonic(self.seconds))

    def dense(self, most: int) -> Floats:
        """[most + 1] seconds of 0 .. ``most``; 0 counts cost nothing."""
        counts = np.arange(most + 1, dtype=np.float64)
        out = np.interp(counts, self.at, self.seconds)
        last = self.at[-1]
        if most > last:
            before = self.at[-2] if len(self.at) > 1 else 0
            earlier = self.seconds[-2] if len(self.at) > 1 else 0.0
            slope = (self.seconds[-1] - earlier) / (last - before)
            out[last + 1 :] = self.seconds[-1] + slope * (counts[last + 1 :] - last)
        out[0] = 0.0
        return out

    def moved(self, count: int, ratio: float) -> Curve:
        """This curve after a step of ``count`` took ``ratio`` times what it says."""
        step = math.log(min(ratio, SLOWER))
        common = FAR * step if ratio >= FASTER else 0.0
        place = int(np.searchsorted(self.at, count))
        near = dict.fromkeys(range(len(self.at)), 0.0)
        if place == len(self.at) or self.at[place] == count:
            near[min(place, len(self.at) - 1)] = 1.0
        elif place == 0:
            near[0] = 1.0
        else:
            left, right = self.at[place - 1], self.at[place]
            near[place] = (count - left) / (right - left)
            near[place - 1] = 1 - near[place]
        moved = [
            s * math.exp(near[i] * NEAR * step + (1 - near[i]) * common)
            for i, s in enumerate(self.seconds)
        ]
        if ratio < FASTER:
            own = moved[min(place, len(moved) - 1)]
            moved = [min(s, own) if at < count else s for s, at in zip(moved, self.at, strict=True)]
        return Curve(self.at, tuple(moved))


@dataclass
class CostTable:
    """Both curves; ``frozen`` ignores what real steps take (tests, simulations)."""

    draft: Curve
    verify: Curve
    frozen: bool = False
    observed: int = 0
    _dense: dict[tuple[str, int], Floats] = field(default_factory=dict, repr=False)

    def draft_seconds(self, most: int) -> Floats:
        """[most + 1] seconds of drafting for 0 .. ``most`` requests."""
        return self._cached("draft", self.draft, most)

    def verify_seconds(self, most: int) -> Floats:
        """[most + 1] seconds of the rest of a step with 0 .. ``most`` tokens."""
        return self._cached("verify", self.verify, most)

    def observe(self, requests: int, drafting: float, tokens: int, verifying: float) -> None:
        """A real step: ``drafting`` seconds for ``requests`` (0: none), ``verifying`` for
        ``tokens``."""
        if self.frozen or tokens < 1 or not verifying > 0:
            return
        self.observed += 1
        if requests > 0 and drafting > 0:
            expected = float(self.draft.dense(requests)[requests])
            self.draft = self.draft.moved(requests, drafting / expected)
        expected = float(self.verify.dense(tokens)[tokens])
        self.verify = self.verify.moved(tokens, verifying / expected)
        self._dense.clear()

    def as_json(self) -> dict[str, list[list[float]]]:
        """``{"draft": [[requests, seconds], ...], "verify": [[tokens, seconds], ...]}``."""
        return {
            name: [list(pair) for pair in zip(curve.at, curve.seconds, strict=True)]
            for name, curve in (("draft", self.draft), ("verify", self.verify))
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any], *, frozen: bool = False) -> CostTable:
        """The table that :meth:`as_json` wrote.

        Raises:
            DecodingError: it is no such table.
        """
        try:
            curves = [
                Curve(tuple(int(n) for n, _ in raw[name]), tuple(float(s) for _, s in raw[name]))
                for name in ("draft", "verify")
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise _error("draft and verify, lists of [count, seconds]", repr(error)) from error
        return CostTable(curves[0], curves[1], frozen=frozen)

    def _cached(self, name: str, curve: Curve, most: int) -> Floats:
        key = (name, most)
        if key not in self._dense:
            if len(self._dense) > 64:
                self._dense.clear()
            self._dense[key] = curve.dense(most)
        return self._dense[key]


def _error(expected: str, found: str) -> DecodingError:
    return DecodingError(
        expected=expected, found=found, where="cost table", fix="Measure the costs again."
    )
