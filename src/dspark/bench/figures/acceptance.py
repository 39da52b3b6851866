"""Adding up counts of drafting over answers, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.bench.figures.schema import Acceptance
from dspark.bench.play.turn import Accepted
from dspark.decoding.acceptance import bootstrap_interval

RESAMPLES = 2000


@dataclass(frozen=True)
class Counted:
    """Counts of one answer (or of part of it) and the prompt they belong to."""

    prompt: str
    counts: Accepted
    tokens: int | None = None


def add_up(parts: Sequence[Counted], seed: int) -> Acceptance | None:
    """Acceptance over ``parts``; None where there are none.

    Intervals need two prompts with steps: fewer say nothing of others.
    """
    if not parts:
        return None
    per_prompt: dict[str, tuple[int, int]] = {}
    for part in parts:
        accepted, steps = per_prompt.get(part.prompt, (0, 0))
        per_prompt[part.prompt] = (
            accepted + part.counts.accepted,
            steps + part.counts.steps,
        )
    pairs = [pair for pair in per_prompt.values() if pair[1]]
    several = len(pairs) > 1
    lengths = [1 + accepted / steps for accepted, steps in pairs]
    total = sum_of(part.counts for part in parts)
    return ratios(total, len(per_prompt), _forward_rate(parts)).model_copy(
        update={
            "interval": bootstrap_interval(pairs, seed) if several else None,
            "length_per_prompt": sum(lengths) / len(lengths) if lengths else None,
            "interval_per_prompt": mean_interval(lengths, seed) if several else None,
        }
    )


def ratios(total: Accepted, prompts: int, tokens_per_forward: float | None = None) -> Acceptance:
    """Everything that follows from totals alone; no intervals."""
    steps, admitted = total.steps, total.admitted
    unconditional = None
    if total.accepted_at is not None and steps:
        unconditional = tuple(count / steps for count in total.accepted_at)
    return Acceptance(
        prompts=prompts,
        steps=steps,
        drafted=total.drafted,
        admitted=admitted,
        accepted=total.accepted,
        length=1 + total.accepted / steps if steps else None,
        rate_drafted=total.accepted / total.drafted if total.drafted else None,
        rate_admitted=total.accepted / admitted if admitted else None,
        tokens_per_forward=tokens_per_forward,
        unconditional=unconditional,
        conditional=_conditional(total),
    )


def sum_of(parts: Iterable[Accepted]) -> Accepted:
    """Totals. A count that one part does not tell is not told of the whole."""
    every = list(parts)
    admitted: int | None = 0
    for part in every:
        admitted = None if admitted is None or part.admitted is None else admitted + part.admitted
    return Accepted(
        steps=sum(p.steps for p in every),
        drafted=sum(p.drafted for p in every),
        admitted=admitted,
        accepted=sum(p.accepted for p in every),
        accepted_at=_columns([p.accepted_at for p in every if p.steps]),
        admitted_at=_columns([p.admitted_at for p in every if p.steps]),
    )


def _columns(rows: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    told = [row for row in rows if row is not None]
    if not told or len(told) < len(rows):
        return None
    width = max(len(row) for row in told)
    return tuple(sum(row[k] for row in told if k < len(row)) for k in range(width))


def _conditional(total: Accepted) -> tuple[float | None, ...] | None:
    """Exact where every step verified the whole block; else only slot 0 is known from totals.

    With a scheduler, how many of the steps that accepted slot k - 1 also verified slot k is in
    neither total.
    """
    at, steps = total.accepted_at, total.steps
    if at is None or not steps:
        return None
    verified = total.admitted_at
    if verified is None and total.drafted < steps * len(at):
        return None
    shares: list[float | None] = []
    for slot, count in enumerate(at):
        before = steps if slot == 0 else at[slot - 1]
        if verified is not None and verified[slot] < steps:
            before = verified[0] if slot == 0 else -1
        shares.append(None if before < 0 else count / before if before else None)
    return tuple(shares)


def _forward_rate(parts: Sequence[Counted]) -> float | None:
    """Tokens behind the first, which is the prompt's own, by the forwards that gave them.

    Each forward gives its accepted tokens and one more, so the rest of the tokens tells how many
    forwards drafted nothing. A last step that ends in its accepted run gives no more: there are
    never fewer forwards than steps.
    """
    whole = [(part.tokens - 1, part.counts) for part in parts if part.tokens]
    if len(whole) < sum(part.counts.steps > 0 for part in parts) or not whole:
        return None
    forwards = sum(max(own.steps, behind - own.accepted) for behind, own in whole)
    return sum(behind for behind, _ in whole) / forwards if forwards else None


def mean_interval(
    values: Sequence[float], seed: int, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of at least one value."""
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    low, high = np.quantile(weights @ data / n, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
