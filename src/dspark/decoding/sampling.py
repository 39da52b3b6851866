"""From logits to a distribution, and from a distribution to a token.

Speculative decoding is lossless only if every party means the same distribution. So there is one
function that turns logits into probabilities, :func:`target_probabilities`, used for the target
and for a probabilistic draft alike, and one that draws, :func:`sample`. The processors run in the
order of the contract (section 5), which is also vLLM's: temperature, min_p, top_k, top_p. min_p and
top_k do not mind the order; top_p does, because it measures mass among what is left.

Drawing inverts the cumulative distribution with a uniform made elsewhere. Randomness is therefore
an argument: tests place the uniforms where they want, and a request's text depends on its seed and
not on its neighbours in the batch. One float64 cumulative sum costs less than Gumbel noise over a
whole vocabulary, and the row need not sum exactly to 1.

Draft, acceptance and residual noise come from three generators (:class:`RandomStreams`). One shared
generator, or two with the same seed, correlates the drafted token with its own test, a bias that no
single-token check reveals (field report: vLLM fork, draft noise overlapping the verifier's).
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from dspark.decoding.params import SamplingParams, Shape
from dspark.errors import DecodingError

StreamName = Literal["draft", "accept", "residual"]
STREAMS: tuple[StreamName, ...] = get_args(StreamName)

# Enough candidates for nearly every nucleus; a wider one falls back to a full sort.
NUCLEUS_CANDIDATES = 512
# PyTorch's CPU generator keeps the low 32 bits of its seed.
SEED_MASK = 0xFFFFFFFF


def safe_argmax(logits: Tensor) -> Tensor:
    """Ids [..] int64 of the largest logits [.., V]: NaN counts as -inf, ties give the lowest id.

    Raises:
        DecodingError: a row whose largest value is not finite: it names no token.
    """
    _check_rows(logits, "logits")
    best, ids = logits.max(-1)
    if bool(torch.isfinite(best).all()):
        return ids
    best, ids = torch.where(torch.isnan(logits), -math.inf, logits).max(-1)
    _refuse_rows(~torch.isfinite(best), "logits", "a finite largest logit")
    return ids


def target_probabilities(logits: Tensor, params: SamplingParams | Shape) -> Tensor:
    """The distribution that sampling with ``params`` draws from.

    Args:
        logits: [.., V]; -inf masks a token out.
        params: temperature 0 gives the one-hot of :func:`safe_argmax`; otherwise temperature,
            min_p, top_k, top_p, in this order.

    Returns:
        [.., V] float32, or float64 when the logits are float64. Rows sum to 1 up to rounding.

    Raises:
        DecodingError: at temperature 0 a row without a finite maximum; otherwise also a row with
            any NaN. The message names the first such row.
    """
    _check_rows(logits, "logits")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if params.temperature == 0:
        ids = safe_argmax(logits).unsqueeze(-1)
        return torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter_(-1, ids, 1.0)
    exact = logits.to(dtype)
    best = exact.amax(-1, keepdim=True)  # NaN and +inf pass through amax; all -inf gives -inf
    _refuse_rows(~torch.isfinite(best.squeeze(-1)), "logits", "no NaN and a finite largest logit")
    # The maximum goes first, so that a small temperature cannot overflow it to inf - inf.
    scores = (exact - best).div_(params.temperature)
    if params.min_p > 0:
        scores.masked_fill_(scores < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[..., -1:]
        scores.masked_fill_(scores < kth, -math.inf)
    if params.top_p < 1:
        scores.masked_fill_(scores < _nucleus_floor(scores, params.top_p), -math.inf)
    return torch.softmax(scores, -1)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw by inverse CDF: the first id whose cumulative probability reaches ``u`` times the total.

    Args:
        probs: [.., V] non-negative weights; rows need not sum exactly to 1.
        u: [..] uniforms in (0, 1]; 0 is tolerated and gives the first possible id.

    Returns:
        ids [..] int64. Never an id of zero probability, whatever ``u`` and the rounding.

    Raises:
        DecodingError: shapes that differ, ``u`` outside [0, 1], or a row with a negative or
            non-finite weight or without any mass.
    """
    _check_rows(probs, "probs")
    if u.shape != probs.shape[:-1] or not u.is_floating_point():
        raise DecodingError(
            expected=f"floating-point u of shape {tuple(probs.shape[:-1])}",
            found=f"{u.dtype} of shape {tuple(u.shape)}",
            where="sample",
            fix="Pass one uniform per row of probs.",
        )
    draw = u.to(device=probs.device, dtype=torch.float64).unsqueeze(-1)
    if not bool(((draw >= 0) & (draw <= 1)).all()):
        raise DecodingError(
            expected="uniforms in [0, 1]",
            found="a value outside it, or NaN",
            where="sample",
            fix="Take u from RandomStreams.uniform.",
        )
    cdf = probs.cumsum(-1, dtype=torch.float64)
    if probs.device.type != "cpu":
        cdf = _flatten_impossible(cdf, probs)
    total = cdf[..., -1:]
    tiny = torch.finfo(torch.float64).tiny
    sound = torch.isfinite(total) & (total > tiny) & (probs.amin(-1, keepdim=True) >= 0)
    _refuse_rows(~sound.squeeze(-1), "probs", "finite, non-negative weights with positive sum")
    # cdf[id - 1] < aim <= cdf[id] with 0 < aim <= cdf[-1]: the cumulative sum rises at id, hence
    # its probability is positive.
    aim = torch.minimum((draw * total).clamp_min(tiny), total)
    return torch.searchsorted(cdf, aim).squeeze(-1)


class RandomStreams:
    """Three independent, reproducible streams of uniforms for one request.

    ``draft`` draws drafted tokens, ``accept`` tests them, ``residual`` draws the token each verify
    step emits itself. Every stream has its own generator, seeded from SHA-256 of (seed, name): how
    much one stream is used never moves another. Host generators on purpose: the same seed gives
    the same text on every device.
    """

    def __init__(self, seed: int) -> None:
        self._generators: dict[str, torch.Generator] = {}
        taken: set[int] = set()
        for name in get_args(StreamName):
            state = _stream_seed(seed, name, taken)
            taken.add(state)
            self._generators[name] = torch.Generator().manual_seed(state)

    def uniform(self, name: StreamName, n: int) -> Tensor:
        """The next ``n`` uniforms [n] of this stream, float64 in (0, 1], on the CPU.

        Raises:
            DecodingError: an unknown stream or a negative count.
        """
        generator = self._generators.get(name)
        if generator is None or n < 0:
            raise DecodingError(
                expected=f"one of {list(self._generators)} and n >= 0",
                found=f"{name!r}, n = {n}",
                where="RandomStreams.uniform",
                fix="Draw draft tokens, acceptance tests and emitted tokens from their own stream.",
            )
        # torch.rand is in [0, 1). An acceptance test at u = 0 would accept impossible tokens.
        return 1.0 - torch.rand(n, generator=generator, dtype=torch.float64)


def _stream_seed(seed: int, name: str, taken: set[int]) -> int:
    """Hash (seed, name) to a 32-bit seed that no other stream of this request uses."""
    attempt = 0
    while True:
        digest = hashlib.sha256(f"dspark/{seed}/{name}/{attempt}".encode()).digest()
        state = int.from_bytes(digest[:8], "little") & SEED_MASK
        if state not in taken:
            return state
        attempt += 1


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """The lowest score [.., 1] of the smallest set that holds ``top_p`` of the mass."""
    vocabulary = scores.shape[-1]
    log_total = torch.logsumexp(scores, -1, keepdim=True).double()
    for width in (min(NUCLEUS_CANDIDATES, vocabulary), vocabulary):
        ranked = scores.topk(width, dim=-1).values
        mass = (ranked.double() - log_total).exp().cumsum(-1)
        if width == vocabulary or bool((mass[..., -1] >= top_p).all()):
            break
    # A token stays while the mass BEFORE it is short of top_p: at least one always stays.
    kept = 1 + (mass[..., :-1] < top_p).sum(-1, keepdim=True)
    return ranked.gather(-1, kept - 1)


def _flatten_impossible(cdf: Tensor, probs: Tensor) -> Tensor:
    """A non-decreasing ``cdf`` [.., V] that is exactly flat where ``probs`` [.., V] is zero.

    A sequential sum is so by itself. A device's parallel scan rounds differently from one id to
    the next, and may step up at an impossible id or even down.
    """
    return torch.where(probs > 0, cdf, 0.0).cummax(-1).values


def _check_rows(rows: Tensor, name: str) -> None:
    if rows.dim() == 0 or rows.shape[-1] == 0 or not rows.is_floating_point():
        raise DecodingError(
            expected=f"floating-point {name} of shape [.., V] with V > 0",
            found=f"{rows.dtype} of shape {tuple(rows.shape)}",
            where="sampling",
            fix="Pass one row over the vocabulary per position.",
        )


def _refuse_rows(bad: Tensor, name: str, expected: str) -> None:
    """Raise if any element of ``bad`` [..] is set, naming the first row and how many there are."""
    if not bool(bad.any()):
        return
    first = bad.nonzero()[0].tolist() if bad.dim() else []
    raise DecodingError(
        expected=f"{expected} in every row of {name}",
        found=f"{int(bad.sum())} of {bad.numel()} rows without, the first at index {first}",
        where=f"{name} row {first}",
        fix="Non-finite values usually mean overflow in a low-precision forward: use float32.",
    )
