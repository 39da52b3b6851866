"""Verification: which drafted tokens stay, and what the emitted token is drawn from.

The draft proposed n admitted tokens x_1..x_n; one target forward gave p_1..p_{n+1} along them. A
rule turns this into a number of accepted tokens and one distribution for the token that the step
emits itself (the bonus, or the correction after a rejection), such that the text is distributed
exactly as the target's own. Three rules (contract, section 5):

* ``greedy``   temperature 0: accept while the drafted token is the target's argmax.
* ``standard`` Leviathan et al. and Chen et al. 2023: test every token on its own, stop at the
  first rejection.
* ``block``    Sun et al., arXiv 2403.10444: test prefixes jointly. A token that was unlikely may
  be bought back by a likely continuation, so the rule takes the LONGEST prefix that passes and does
  not stop at the first failure. Never accepts fewer tokens in expectation, same distribution.

Every rule is the same two steps: thresholds h_i against independent uniforms u_i in (0, 1], then a
residual distribution. A test passes when u_i <= h_i, for every rule: with u in (0, 1] a threshold
of 1 is then certain and one of 0 impossible. (Written with <, the standard test could reject at
u = 1 although p = q, and its residual would have no mass.)

The draft's q_i must be what x_i was drawn from. A draft that takes its argmax has a point mass for
q, written ``None`` here, never its softmax: testing an argmax token against softmax q is biased.
All arithmetic is float64: V terms of a residual in float32 would cost several digits.

Requests with equally many admitted tokens are decided together (:func:`decide_many`); rows of
doubles are made for as many requests at once as fit into the processor's cache, which is one for a
large vocabulary and hundreds for a toy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dspark.errors import DecodingError

Rule = Literal["greedy", "standard", "block"]
DraftSampleMethod = Literal["greedy", "probabilistic"]

# float32 softmax over a large vocabulary sums to 1 within about 1e-6; logits or half-precision
# probabilities passed by mistake are far outside.
SUM_TOLERANCE = 1e-4
# Doubles worked on at once: half a mebibyte.
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Decision:
    """``accepted`` drafted tokens stay; the next token is drawn from ``next_probs`` [V] float64."""

    accepted: int
    next_probs: Tensor


@dataclass(frozen=True, eq=False)
class Decisions:
    """Of R requests: ``accepted`` [R] int64, ``next_probs`` [R, V] float64."""

    accepted: Tensor
    next_probs: Tensor


def check_modes(verification: str, draft_sample_method: str, temperature: float) -> Rule:
    """The rule that serves these settings; nothing falls back silently.

    At temperature 0 every verification is ``greedy``: both distributions are one-hot and the other
    two rules then accept and emit the very same tokens.

    Raises:
        DecodingError: an unknown name, greedy verification at a positive temperature, or block
            verification of greedy drafts at a positive temperature.
    """
    where = "verification settings"
    if verification not in get_args(Rule):
        raise _error(f"one of {list(get_args(Rule))}", f"{verification!r}", where)
    if draft_sample_method not in get_args(DraftSampleMethod):
        raise _error(f"one of {list(get_args(DraftSampleMethod))}", draft_sample_method, where)
    if not 0 <= temperature < float("inf"):
        raise _error("a finite temperature >= 0", f"{temperature}", where)
    if temperature == 0:
        return "greedy"
    if verification == "greedy":
        raise DecodingError(
            expected="standard or block verification at a positive temperature",
            found=f"greedy at temperature {temperature}",
            where=where,
            fix="Greedy verification would change the distribution: set temperature 0 or standard.",
        )
    if verification == "block" and draft_sample_method == "greedy":
        raise DecodingError(
            expected="draft_sample_method: probabilistic with verification: block",
            found="draft_sample_method: greedy",
            where=where,
            fix="With one-hot drafts block equals standard: use draft_sample_method probabilistic, "
            "or verification standard.",
        )
    return "standard" if verification == "standard" else "block"


def decide(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor) -> Decision:
    """Verify one request's admitted tokens.

    Args:
        rule: see the module docstring.
        p: [n + 1, V] target distributions (float32 or float64); row i follows x_1..x_i. One-hot
            rows for ``greedy``.
        q: [n, V] the distributions that ``ids`` were drawn from, or None for an argmax draft.
        ids: [n] int64 admitted drafted tokens; n may be 0.
        u: [n] uniforms in (0, 1], independent of the noise that drew ``ids``.

    Returns:
        How many tokens stay, and the distribution of the token to emit after them.

    Raises:
        DecodingError: wrong shapes or dtypes, ids outside the vocabulary, uniforms outside (0, 1],
            rows that are not distributions, zero q for a drafted token, block with ``q`` None.
    """
    many = decide_many(
        rule, p.unsqueeze(0), None if q is None else q.unsqueeze(0), ids.unsqueeze(0),
        u.unsqueeze(0),
    )  # fmt: skip
    return Decision(int(many.accepted[0]), many.next_probs[0])


def decide_many(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor) -> Decisions:
    """:func:`decide` for R requests with n admitted tokens each.

    Args, raises: as :func:`decide` with a leading dimension R everywhere.
    """
    target, draft = _checked(rule, p, q, ids)
    n = ids.shape[1]
    joint = None if draft is None else _joint_ratios(target, draft, ids)
    passed = _uniforms(u, ids.shape) <= _thresholds(rule, target, draft, joint, ids)
    if rule == "block":
        order = torch.arange(1, n + 1, device=ids.device)
        accepted = (passed * order).amax(1) if n else ids.new_zeros(len(ids))
    else:
        accepted = passed.long().cumprod(1).sum(1)
    rows = target.rows(accepted)
    short = (accepted < n).nonzero().squeeze(1)
    if rule == "greedy" or not len(short):
        return Decisions(accepted, rows)
    at, whole = accepted[short], len(short) == len(rows)
    own = rows if whole else rows[short]
    if draft is None:
        # scale * p(x) - 1 <= 0 at the drafted token; nothing is subtracted elsewhere.
        left = own.scatter(1, ids[short, at].unsqueeze(1), 0.0)
    else:
        left = own.clone()
        if rule == "block" and joint is not None:
            left.mul_(joint[short, at].unsqueeze(1))
        left.sub_(draft.rows(accepted, short)).clamp_min_(0.0)
    owed = _normed(left, own)
    if whole:
        return Decisions(accepted, owed)
    rows[short] = owed
    return Decisions(accepted, rows)


def decide_greedy(target_argmax: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy rule without distributions, for speed at temperature 0.

    Args:
        target_argmax: [.., n + 1] int64, the target's argmax after each prefix.
        ids: [.., n] int64 admitted drafted tokens; n may be 0.

    Returns:
        (accepted [..], next ids [..]), equal to ``decide("greedy", ...)`` on one-hot rows.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    if ids.dim() < 1 or ids.dtype != torch.int64 or target_argmax.dtype != torch.int64:
        raise _error("int64 ids of shape [.., n]", f"{ids.dtype} {tuple(ids.shape)}", "ids")
    wanted = (*ids.shape[:-1], ids.shape[-1] + 1)
    if target_argmax.shape != wanted:
        raise _error(f"shape {list(wanted)}", f"{tuple(target_argmax.shape)}", "target_argmax")
    accepted = (ids == target_argmax[..., :-1]).long().cumprod(-1).sum(-1)
    return accepted, target_argmax.gather(-1, accepted.unsqueeze(-1)).squeeze(-1)


def acceptance_thresholds(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor) -> Tensor:
    """h [n] float64 in [0, 1]: test i passes when u_i <= h_i. Arguments as :func:`decide`."""
    batch = ids.unsqueeze(0)
    target, draft = _checked(rule, p.unsqueeze(0), None if q is None else q.unsqueeze(0), batch)
    joint = None if draft is None else _joint_ratios(target, draft, batch)
    return _thresholds(rule, target, draft, joint, batch)[0]


def residual(p: Tensor, q: Tensor | int, scale: float = 1.0) -> Tensor:
    """norm(max(scale * p - q, 0)): what a rejected position still owes to the target.

    Args:
        p: [V] target distribution at the rejected position.
        q: [V] draft distribution there, or an id: the point mass on it.
        scale: r_tau of block verification; 1 otherwise.

    Returns:
        [V] float64, summing to 1. Without any mass (p equals q up to rounding, reached with
        probability of the order of the rounding) it is p itself, whose support is sound.
    """
    exact = p.double()
    if isinstance(q, int):
        left = exact * scale
        left[q] = 0.0  # scale * p(x) - 1 <= 0
    else:
        left = torch.clamp_min(exact * scale - q.double(), 0.0)
    return _normed(left.unsqueeze(0), exact.unsqueeze(0))[0]


def _normed(left: Tensor, fallback: Tensor) -> Tensor:
    """Rows [R, V] of ``left`` (used up) summing to 1; those without mass are ``fallback``'s."""
    mass = left.sum(1, keepdim=True)
    if bool((mass > 0).all()):
        return left.div_(mass)
    return torch.where(mass > 0, left / mass, fallback / fallback.sum(1, keepdim=True))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Checked distributions ``raw`` [R, m, V] with their sums [R, m] float64."""

    raw: Tensor
    totals: Tensor

    @classmethod
    def checked(cls, raw: Tensor, count: int, name: str) -> _Rows:
        if raw.dim() != 3 or raw.shape[1] != count or raw.shape[2] == 0:
            raise _error(f"shape [{count}, V] per request", f"{tuple(raw.shape)}", name)
        if raw.dtype not in (torch.float32, torch.float64):
            raise _error("float32 or float64 probabilities", f"{raw.dtype}", name)
        flat = raw.flatten(0, 1)
        sums = [part.double().sum(1) for part in flat.split(max(1, CHUNK // raw.shape[2]))]
        totals = torch.cat(sums) if sums else flat.new_zeros(0, dtype=torch.float64)
        least = flat.amin(1) if len(flat) else totals
        bad = ~(((totals - 1.0).abs() <= SUM_TOLERANCE) & (least >= 0))  # NaN fails both
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            found = f"sum {float(totals[row]):.6g}, minimum {float(least[row]):.3g} in row {row}"
            raise _error("non-negative rows that sum to 1", found, name)
        return cls(raw, totals.view(raw.shape[:2]))

    def chunks(self) -> list[slice]:
        """Requests whose rows of doubles are worked on together."""
        size = max(1, CHUNK // self.raw.shape[2])
        return [slice(i, i + size) for i in range(0, len(self.raw), size)]

    def slot(self, index: int, requests: slice) -> Tensor:
        """[r, V] float64 that sums to 1: no bias is left by float32 rounding of the sum."""
        return self.raw[requests, index].double() / self.totals[requests, index].unsqueeze(1)

    def rows(self, index: Tensor, requests: Tensor | None = None) -> Tensor:
        """Row ``index[r]`` of every request (or of ``requests``), [r, V] float64."""
        every = torch.arange(len(self.raw), device=index.device) if requests is None else requests
        at = index[every]
        return self.raw[every, at].double().div_(self.totals[every, at].unsqueeze(1))

    def at(self, ids: Tensor) -> Tensor:
        """[R, n] float64: probability of ``ids[r, i]`` in row i."""
        n = ids.shape[1]
        picked = self.raw[:, :n].gather(2, ids.unsqueeze(2)).squeeze(2)
        return picked.double() / self.totals[:, :n]


def _thresholds(
    rule: Rule, target: _Rows, draft: _Rows | None, joint: Tensor | None, ids: Tensor
) -> Tensor:
    """h_1..h_n of the module docstring, [R, n] float64."""
    if rule == "greedy" or draft is None or joint is None:
        return target.at(ids)  # one-hot p under greedy; under a point-mass draft p(x) / 1
    if rule == "standard":
        return (target.at(ids) / draft.at(ids)).clamp_max(1.0)
    thresholds = joint[:, 1:].clone()  # h_n = r_n
    for i in range(1, ids.shape[1]):
        for part in target.chunks():
            r = joint[part, i]
            gap = target.slot(i, part).mul_(r.unsqueeze(1)).sub_(draft.slot(i, part))
            owed = gap.clamp_min_(0.0).sum(1)
            whole = owed + 1.0 - r
            safe = torch.where(whole > 0, whole, 1.0)
            thresholds[part, i - 1] = torch.where(whole > 0, owed / safe, 1.0).clamp_max(1.0)
    return thresholds


def _joint_ratios(target: _Rows, draft: _Rows, ids: Tensor) -> Tensor:
    """r_0..r_n of block verification, [R, n + 1]: r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i))."""
    wanted, drawn = target.at(ids), draft.at(ids)
    ratios = [torch.ones(len(ids), dtype=torch.float64, device=ids.device)]
    for slot in range(ids.shape[1]):
        # Multiply before dividing: 0 * (p / tiny q = inf) would be NaN.
        ratios.append((ratios[-1] * wanted[:, slot] / drawn[:, slot]).clamp_max(1.0))
    return torch.stack(ratios, 1)


def _uniforms(u: Tensor, shape: torch.Size) -> Tensor:
    if u.shape != shape or not u.is_floating_point():
        expected = f"floating-point u of shape [{shape[1]}] per request"
        raise _error(expected, f"{u.dtype} {tuple(u.shape)}", "u")
    if not bool(((u > 0) & (u <= 1)).all()):
        raise _error("uniforms in (0, 1]", f"{u.flatten().tolist()[:8]}", "u")
    return u.double()


def _checked(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor) -> tuple[_Rows, _Rows | None]:
    """p and q as checked rows, or a DecodingError."""
    if rule not in get_args(Rule):
        raise _error(f"one of {list(get_args(Rule))}", f"{rule!r}", "rule")
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise _error("int64 ids of shape [n] per request", f"{ids.dtype} {tuple(ids.shape)}", "ids")
    n = ids.shape[1]
    target = _Rows.checked(p, n + 1, "p")
    vocabulary = p.shape[2]
    if not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise _error(f"ids in [0, {vocabulary})", f"{ids.tolist()}", "ids")
    if rule == "greedy" and not bool(((p.amax(2) == 1.0) & (target.totals == 1.0)).all()):
        raise _error("one-hot rows (temperature 0) for greedy verification", "others", "p")
    if q is None:
        if rule == "block":
            raise _error("q of a probabilistic draft for block verification", "None", "q")
        return target, None
    if q.shape != (len(ids), n, vocabulary):
        raise _error(f"shape [{n}, {vocabulary}] per request", f"{tuple(q.shape)}", "q")
    draft = _Rows.checked(q, n, "q")
    zero = draft.at(ids) == 0
    if bool(zero.any()):
        request, slot = zero.nonzero()[0].tolist()
        raise DecodingError(
            expected="q to be exactly the distribution that every drafted token was drawn from",
            found=f"probability 0 for the token {int(ids[request, slot])} drafted at slot {slot}",
            where="verify: q",
            fix="Pass the truncated distribution that was sampled, or None for argmax drafts.",
        )
    return target, draft


def _error(expected: str, found: str, where: str) -> DecodingError:
    return DecodingError(
        expected=expected, found=found, where=f"verify: {where}", fix="Correct the caller's input."
    )
