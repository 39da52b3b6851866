"""How many drafted tokens of each request are worth verifying: pure functions, no tensors of torch.

A drafted token pays when the tokens it is expected to add are worth the time its verification adds.
With a the survival of a slot (product of the confidences up to it), B the tokens that a step
verifies and s[B] its seconds, a step that admits the slots A is expected to emit
tau = R + sum of a over A, and its rate is Theta = tau / s[B]. The paper (arXiv 2607.05147, section
3.2) writes SPS(B) for 1 / s[B].

Exactness decides the form of the algorithms. A width must not depend on the token it admits, nor on
any behind it (appendix A of the paper: a scheduler that looks ahead turns 0.7 / 0.3 into
0.85 / 0.15). The confidence of slot j is known once slots before j are drawn. So:

* :func:`sync` (Algorithm 1) takes slots by falling survival and stops at the first that does not
  raise Theta. All it has seen by then are survivals of admitted slots and of one more per request,
  which admitted tokens decide. The early stop is what makes it exact, and what lets a cliff in s
  trap it.
* :func:`budget` searches all counts, across cliffs, and so looks ahead. It is exact on confidences
  of EARLIER steps; :func:`top` then spends that fixed count on the live survivals.
* :func:`threshold` admits while survival is high enough, whatever a step costs.
* :func:`worth_drafting` decides before anything is drawn, on predictions from earlier steps.

Equal survivals are ordered by slot, then by request; token values are nowhere an argument.

The order is made by sorting integers that hold survival above and slot number below: no argsort, no
Python loop, some 100 microseconds for 512 requests of 7 slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.errors import DecodingError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MINIMUM_GAIN = 0.04


def survivals(confidences: Floats) -> Floats:
    """a [R, K]: products of ``confidences`` [R, K] along each row. Never rises along a row."""
    return np.cumprod(confidences, axis=1, dtype=np.float64)


def ranked(survival: Floats) -> tuple[Floats, Ints]:
    """Slots by falling survival: (values [N], request numbers [N]) of ``survival`` [R, K].

    Equal values (to one part in 10^10) stand by slot, then by request, so that slots of one request
    keep their order.

    Raises:
        DecodingError: values outside [0, 1], or NaN.
    """
    requests = len(survival)
    flat = survival.T.ravel() + 0.0  # a copy, and no -0.0, whose bits are those of a negative
    if not flat.size:
        return flat, np.zeros(0, dtype=np.int64)
    if not (flat.min() >= 0.0 and flat.max() <= 1.0):  # NaN fails both
        raise DecodingError(
            expected="survivals in [0, 1]",
            found=f"minimum {flat.min()}, maximum {flat.max()}",
            where="schedule",
            fix="A confidence head with non-finite weights gives this: check the draft.",
        )
    low = (1 << int(flat.size).bit_length()) - 1
    # Bits of non-negative doubles are ordered as the doubles are.
    keys = (flat.view(np.int64) & ~low) | (low - np.arange(flat.size))
    keys.sort()
    index = low - (keys[::-1] & low)
    return flat[index], index % requests


def rates(values: Floats, seconds: Floats, tokens: int, emitted: float) -> Floats:
    """Theta [N + 1] when the first 0 .. N of ``values`` [N] are admitted.

    Args:
        values: survivals in the order in which they would be admitted.
        seconds: [B + 1] seconds of a whole step by the number of tokens it verifies. Counts
            beyond its end are not offered: fewer rates come back.
        tokens: verified in any case.
        emitted: tokens expected in any case.
    """
    count = min(len(values), len(seconds) - 1 - tokens)
    expected = np.empty(count + 1)
    expected[0] = emitted
    np.cumsum(values[:count], out=expected[1:])
    expected[1:] += emitted
    return expected / seconds[tokens : tokens + count + 1]


def fixed(survival: Floats) -> Ints:
    """Widths [R]: every slot that exists (survival above 0)."""
    return np.asarray(np.count_nonzero(survival, axis=1), dtype=np.int64)


def threshold(survival: Floats, least: float) -> Ints:
    """Widths [R]: slots whose survival is at least ``least`` (and above 0)."""
    high = (survival >= least) & (survival > 0)
    return np.asarray(np.count_nonzero(high, axis=1), dtype=np.int64)


def sync(
    survival: Floats, seconds: Floats, tokens: int | None = None, emitted: float | None = None
) -> Ints:
    """Widths [R] by Algorithm 1: admit by falling survival until Theta stops to rise.

    Args:
        survival: [R, K] live survivals; 0 for slots that do not exist.
        seconds, tokens, emitted: as :func:`rates`; ``tokens`` and ``emitted`` default to R, the
            anchors and the tokens that every verify step emits itself.
    """
    requests = len(survival)
    values, rows = ranked(survival)
    tokens = requests if tokens is None else tokens
    theta = rates(values, seconds, tokens, float(requests) if emitted is None else emitted)
    stops = theta[1:] <= theta[:-1]
    count = int(stops.argmax()) if stops.any() else len(stops)
    return _widths(rows[:count], requests)


def budget(
    survival: Floats, seconds: Floats, tokens: int | None = None, emitted: float | None = None
) -> int:
    """How many slots to admit for the largest Theta over all counts; arguments as :func:`sync`.

    The caller must give survivals of earlier steps: with live ones this looks ahead.
    """
    requests = len(survival)
    values, _ = ranked(survival)
    tokens = requests if tokens is None else tokens
    return int(
        rates(values, seconds, tokens, float(requests) if emitted is None else emitted).argmax()
    )


def top(survival: Floats, count: int) -> Ints:
    """Widths [R]: the ``count`` slots of largest survival; none of survival 0."""
    values, rows = ranked(survival)
    count = min(count, int(np.count_nonzero(values)))
    return _widths(rows[:count], len(survival))


def worth_drafting(
    predicted: Floats,
    draft: Floats,
    verify: Floats,
    *,
    tokens: int,
    emitted: float,
    drafting: int = 0,
    gain: float = MINIMUM_GAIN,
) -> Bools:
    """Which requests pay for their drafting, [R]; decided before anything is drawn.

    A request pays when its best width, at the going rate, covers the verification of its tokens and
    its own share of the draft pass. Then the whole must beat not drafting for any by ``gain``.

    Args:
        predicted: [R, K] survivals expected from earlier steps.
        draft: [M + 1] seconds of drafting by the number of requests; ``draft[0]`` is 0.
        verify: [B + 1] seconds of the rest of a step by the number of tokens.
        tokens, emitted: of the step without these requests' drafts.
        drafting: requests that draft in any case.
    """
    requests = len(predicted)
    chosen = np.ones(requests, dtype=np.bool_)
    if not requests:
        return chosen
    most = len(verify) - 1
    plain = emitted / (draft[min(drafting, len(draft) - 1)] + verify[min(tokens, most)])

    def best(rows: Bools) -> tuple[float, int, float]:
        """Rate, tokens admitted and seconds of one request's draft for these ``rows``."""
        count = min(drafting + int(rows.sum()), len(draft) - 1)
        values, _ = ranked(predicted[rows])
        theta = rates(values, draft[count] + verify, tokens, emitted)
        share = (draft[count] - draft[1]) / (count - 1) if count > 1 else 0.0
        at = int(theta.argmax())
        return float(theta[at]), at, float(share)

    rate, admitted, share = best(chosen)
    for _ in range(2):
        end = min(tokens + max(admitted, 1), most)
        slope = (verify[end] - verify[tokens]) / max(end - tokens, 1)
        worth = (predicted - rate * slope).cumsum(1).max(1)
        before, chosen = chosen, worth > rate * share
        if bool((before == chosen).all()):
            break
        rate, admitted, share = best(chosen)
    if rate < (1.0 + gain) * plain:
        chosen[:] = False
    return chosen


def _widths(rows: Ints, requests: int) -> Ints:
    """How often each request number occurs in ``rows``, [requests]."""
    return np.asarray(np.bincount(rows, minlength=requests), dtype=np.int64)
