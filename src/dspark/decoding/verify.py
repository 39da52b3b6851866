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


@dataclass(frozen=True, eq=False)
class Decision:
    """``accepted`` drafted tokens stay; the next token is drawn from ``next_probs`` [V] float64."""

    accepted: int
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
    target, draft = _checked(rule, p, q, ids)
    drafted, draws = ids.tolist(), _uniforms(u, ids.shape[0])
    thresholds = _thresholds(rule, target, draft, drafted)
    passed = [draw <= h for draw, h in zip(draws, thresholds, strict=True)]
    if rule == "block":
        accepted = max((i for i, good in enumerate(passed, 1) if good), default=0)
    else:
        accepted = passed.index(False) if False in passed else len(passed)
    row = target.row(accepted)
    if accepted == len(drafted) or rule == "greedy":
        return Decision(accepted, row)
    if draft is None:
        return Decision(accepted, residual(row, drafted[accepted]))
    scale = _joint_ratios(target, draft, drafted)[accepted] if rule == "block" else 1.0
    return Decision(accepted, residual(row, draft.row(accepted), scale))


def decide_greedy(target_argmax: Tensor, ids: Tensor) -> tuple[int, int]:
    """The greedy rule without distributions, for speed at temperature 0.

    Args:
        target_argmax: [n + 1] int64, the target's argmax after each prefix.
        ids: [n] int64 admitted drafted tokens; n may be 0.

    Returns:
        (accepted, next_id), equal to ``decide("greedy", ...)`` on one-hot rows.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    if ids.dim() != 1 or ids.dtype != torch.int64 or target_argmax.dtype != torch.int64:
        raise _error("int64 ids of shape [n]", f"{ids.dtype} {tuple(ids.shape)}", "ids")
    if target_argmax.shape != (ids.shape[0] + 1,):
        found = f"{tuple(target_argmax.shape)}"
        raise _error(f"shape [{ids.shape[0] + 1}]", found, "target_argmax")
    wanted = target_argmax.tolist()
    accepted = 0
    for drafted, best in zip(ids.tolist(), wanted, strict=False):
        if drafted != best:
            break
        accepted += 1
    return accepted, int(wanted[accepted])


def acceptance_thresholds(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor) -> Tensor:
    """h [n] float64 in [0, 1]: test i passes when u_i <= h_i. Arguments as :func:`decide`."""
    h = _thresholds(rule, *_checked(rule, p, q, ids), ids.tolist())
    return torch.tensor(h, dtype=torch.float64, device=p.device)


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
    mass = left.sum()
    if not bool(mass > 0):
        return exact / exact.sum()
    return left / mass


@dataclass(frozen=True, eq=False)
class _Rows:
    """Checked distributions [count, V], normalised to float64 one row at a time.

    A row of doubles stays in the processor's cache; all rows at once are several times slower.
    """

    raw: Tensor
    totals: list[float]

    @classmethod
    def checked(cls, raw: Tensor, count: int, name: str) -> _Rows:
        if raw.dim() != 2 or raw.shape[0] != count or raw.shape[1] == 0:
            raise _error(f"shape [{count}, V]", f"{tuple(raw.shape)}", name)
        if raw.dtype not in (torch.float32, torch.float64):
            raise _error("float32 or float64 probabilities", f"{raw.dtype}", name)
        totals = [float(row.double().sum()) for row in raw]
        for index, (total, least) in enumerate(zip(totals, raw.amin(1).tolist(), strict=True)):
            if not (abs(total - 1.0) <= SUM_TOLERANCE and least >= 0):  # NaN fails both
                found = f"sum {total:.6g}, minimum {least:.3g} in row {index}"
                raise _error("non-negative rows that sum to 1", found, name)
        return cls(raw, totals)

    def row(self, index: int) -> Tensor:
        """[V] float64 that sums to 1: no bias is left by float32 rounding of the sum."""
        return self.raw[index].double() / self.totals[index]

    def at(self, ids: list[int]) -> list[float]:
        """The probability of ``ids[i]`` in row i, for the first len(ids) rows."""
        column = torch.tensor(ids, dtype=torch.int64, device=self.raw.device).unsqueeze(1)
        picked = self.raw[: len(ids)].gather(1, column).squeeze(1).tolist()
        return [value / total for value, total in zip(picked, self.totals, strict=False)]


def _thresholds(rule: Rule, target: _Rows, draft: _Rows | None, ids: list[int]) -> list[float]:
    """h_1..h_n of the module docstring."""
    if rule == "greedy" or draft is None:
        return target.at(ids)  # one-hot p under greedy; under a point-mass draft p(x) / 1
    if rule == "standard":
        pairs = zip(target.at(ids), draft.at(ids), strict=True)
        return [min(1.0, wanted / drawn) for wanted, drawn in pairs]
    joint = _joint_ratios(target, draft, ids)
    thresholds = joint[1:]  # h_n = r_n
    for i in range(1, len(ids)):
        r = joint[i]
        owed = float(target.row(i).mul_(r).sub_(draft.row(i)).clamp_min_(0.0).sum())
        whole = owed + 1.0 - r
        thresholds[i - 1] = min(1.0, owed / whole) if whole > 0 else 1.0
    return thresholds


def _joint_ratios(target: _Rows, draft: _Rows, ids: list[int]) -> list[float]:
    """r_0..r_n of block verification: r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), r_0 = 1."""
    ratios = [1.0]
    for wanted, drawn in zip(target.at(ids), draft.at(ids), strict=True):
        # Multiply before dividing: 0 * (p / tiny q = inf) would be NaN.
        ratios.append(min(1.0, ratios[-1] * wanted / drawn))
    return ratios


def _uniforms(u: Tensor, n: int) -> list[float]:
    if u.shape != (n,) or not u.is_floating_point():
        raise _error(f"floating-point u of shape [{n}]", f"{u.dtype} {tuple(u.shape)}", "u")
    draws: list[float] = u.tolist()
    if not all(0 < draw <= 1 for draw in draws):
        raise _error("uniforms in (0, 1]", f"{draws}", "u")
    return draws


def _checked(rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor) -> tuple[_Rows, _Rows | None]:
    """p and q as checked rows, or a DecodingError."""
    if rule not in get_args(Rule):
        raise _error(f"one of {list(get_args(Rule))}", f"{rule!r}", "rule")
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise _error("int64 ids of shape [n]", f"{ids.dtype} {tuple(ids.shape)}", "ids")
    n, drafted = ids.shape[0], ids.tolist()
    target = _Rows.checked(p, n + 1, "p")
    vocabulary = p.shape[1]
    if not all(0 <= token < vocabulary for token in drafted):
        raise _error(f"ids in [0, {vocabulary})", f"{drafted}", "ids")
    one_hot = (p.amax(1) == 1.0).tolist()
    if rule == "greedy" and not (all(one_hot) and all(total == 1.0 for total in target.totals)):
        raise _error("one-hot rows (temperature 0) for greedy verification", "others", "p")
    if q is None:
        if rule == "block":
            raise _error("q of a probabilistic draft for block verification", "None", "q")
        return target, None
    if q.shape != (n, vocabulary):
        raise _error(f"shape [{n}, {vocabulary}]", f"{tuple(q.shape)}", "q")
    draft = _Rows.checked(q, n, "q")
    for slot, drawn in enumerate(draft.at(drafted)):
        if drawn == 0:
            raise DecodingError(
                expected="q to be exactly the distribution that every drafted token was drawn from",
                found=f"probability 0 for the token {drafted[slot]} drafted at slot {slot}",
                where="verify: q",
                fix="Pass the truncated distribution that was sampled, or None for argmax drafts.",
            )
    return target, draft


def _error(expected: str, found: str, where: str) -> DecodingError:
    return DecodingError(
        expected=expected, found=found, where=f"verify: {where}", fix="Correct the caller's input."
    )
