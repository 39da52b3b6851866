"""Two drafts on one stack, compared prompt by prompt.

Both were asked the same prompts, so what is hard about a prompt cancels: resamples draw prompts and
take both drafts' counts with them. Two averages are in use and differ, so both are given:
``ratio_of_means``, the mean over benchmarks of one table divided by that of the other, and
``mean_of_ratios``, the mean over benchmarks of the ratios. At temperature 0 the texts of exact
engines are equal; where they are not, the drafts were measured on different texts, and it is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.bench.figures.acceptance import RESAMPLES
from dspark.bench.figures.comparison import (
    MOST_DIVERGENCES,
    Comparison,
    Divergence,
    Identity,
    Overall,
    PairFigures,
)
from dspark.bench.figures.schema import ArmFigures, Interval, PromptRow, SuiteResults
from dspark.errors import DataError

Keyed = dict[tuple[str, float], ArmFigures]


@dataclass(frozen=True)
class _Paired:
    """(accepted, steps) of both, prompt by prompt: [prompts, 4]."""

    counts: np.ndarray

    def ratios(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pooled lengths of a and b under each row of ``weights`` [resamples, prompts]."""
        sums = weights @ self.counts
        return 1 + sums[:, 0] / sums[:, 1], 1 + sums[:, 2] / sums[:, 3]


LEAST_PROMPTS = 10
"""Paired prompts of a benchmark below which no draft is called better: resampling a handful of
prompts gives intervals that are far too narrow."""


def table_averages(rows: Sequence[tuple[str, float, float]]) -> tuple[float, float]:
    """``(ratio_of_means, mean_of_ratios)`` of a / b over (benchmark, a, b).

    Raises:
        DataError: no rows, a benchmark twice, or a length below 1.
    """
    names = [name for name, _, _ in rows]
    bad = [f"{n}: {a:g}, {b:g}" for n, a, b in rows if not (a >= 1 and b >= 1)]
    if not rows or len(set(names)) < len(names) or bad:
        raise DataError(
            expected="acceptance lengths (at least 1) of different benchmarks",
            found="; ".join(bad) or f"benchmarks {names}",
            where="comparison table",
            fix='Write {"rows": [{"benchmark": "GSM8K", "a": 3.96, "b": 4.90}]}',
        )
    a = sum(row[1] for row in rows) / len(rows)
    b = sum(row[2] for row in rows) / len(rows)
    return a / b, sum(row[1] / row[2] for row in rows) / len(rows)


def compare_results(
    a: SuiteResults,
    b: SuiteResults,
    names: tuple[str, str],
    identities: Mapping[tuple[str, float], Sequence[Identity]] | None = None,
    notices: Sequence[str] = (),
) -> Comparison:
    """Everything that two results have in common.

    Args:
        identities: per (task, temperature), found where the answers are at hand.

    Raises:
        DataError: no benchmark was measured by both with the same definition and settings.
    """
    first, second = _arms(a), _arms(b)
    told = [*notices, *_unlike(first, second)]
    shared = [key for key in first if key in second]
    if not shared:
        raise DataError(
            expected="results with a benchmark in common, measured alike",
            found="; ".join(told) or "none in common",
            where=f"{names[0]} and {names[1]}",
            fix="Measure both with the same suite and settings.",
        )
    seed = a.settings.seed
    pairs, paired = [], {}
    for key in shared:
        found = (identities or {}).get(key) or _hash_identity(first[key], second[key], names)
        counts = _pair_up(first[key], second[key])
        paired[key] = counts
        pairs.append(_figures(first[key], second[key], counts, seed, tuple(found)))
    temperatures = sorted({temperature for _, temperature in shared})
    overall = []
    for temperature in temperatures:
        own = [p for p in pairs if p.temperature == temperature]
        counts_of = [paired[p.task, temperature] for p in own]
        made = _overall(temperature, own, counts_of, names, seed)
        if made is not None:
            overall.append(made)
    return Comparison(
        a=names[0],
        b=names[1],
        pairs=tuple(pairs),
        overall=tuple(overall),
        stack_differences=tuple(stack_differences(a, b)),
        notices=tuple(told),
    )


def stack_differences(a: SuiteResults, b: SuiteResults) -> list[str]:
    """What differs besides the draft: every such line makes the comparison unfair.

    What only one side tells (a server tells little) is named in one line at the end.
    """
    found, untold = [], []
    for where, one, other in (
        ("stack", a.stack, b.stack),
        ("settings", a.settings.model_dump(), b.settings.model_dump()),
        ("machine", a.made.get("machine", {}), b.made.get("machine", {})),
    ):
        for key in sorted(
            {*one, *other} - {"url", "grade", "skip_missing", "tries", "timeout", "note"}
        ):
            if (one.get(key) is None) != (other.get(key) is None):
                untold.append(f"{where} {key}")
            elif one.get(key) != other.get(key):
                found.append(f"{where} {key}: {one.get(key)!r} and {other.get(key)!r}")
    return [*found, f"told by one side only: {', '.join(untold)}"] if untold else found


def _arms(results: SuiteResults) -> Keyed:
    return {(arm.task, arm.temperature): arm for arm in results.arms}


def _unlike(first: Keyed, second: Keyed) -> list[str]:
    """Benchmarks that cannot be compared, taken out of ``second``; and why."""
    told = []
    for key in [k for k in first if k in second]:
        one, other = first[key], second[key]
        for name in ("task_hash", "top_p", "max_tokens"):
            if getattr(one, name) != getattr(other, name):
                told.append(f"{one.title} at T = {key[1]:g} is left out: another {name}.")
                del second[key]
                break
    alone = sorted({k[0] for k in first} ^ {k[0] for k in second})
    if alone:
        told.append(f"Measured by one alone and left out: {', '.join(alone)}.")
    return told


def _pair_up(a: ArmFigures, b: ArmFigures) -> _Paired:
    """Prompts with steps of both; a prompt is what was asked, not what it is called."""
    others = {row.key: row for row in b.prompts if row.steps}
    rows = [
        (one.accepted, one.steps, others[one.key].accepted, others[one.key].steps)
        for one in a.prompts
        if one.steps and one.key in others
    ]
    return _Paired(np.array(rows, dtype=np.float64).reshape(-1, 4))


def _figures(
    a: ArmFigures, b: ArmFigures, paired: _Paired, seed: int, identity: tuple[Identity, ...]
) -> PairFigures:
    n = len(paired.counts)
    speed = None
    if a.speed is not None and b.speed is not None:
        one, other = a.speed.tokens_per_second, b.speed.tokens_per_second
        speed = one / other if one and other else None
    base = PairFigures(
        task=a.task,
        title=a.title,
        temperature=a.temperature,
        prompts=n,
        unpaired=max(len(a.prompts), len(b.prompts)) - n,
        a=a.acceptance.length if a.acceptance else None,
        b=b.acceptance.length if b.acceptance else None,
        speed_ratio=speed,
        identity=identity,
    )
    if n == 0:
        ratio = base.a / base.b if base.a and base.b else None
        return base.model_copy(update={"ratio": ratio})
    accepted_a, steps_a, accepted_b, steps_b = paired.counts.T
    own_a, own_b = 1 + accepted_a / steps_a, 1 + accepted_b / steps_b
    (pooled_a,), (pooled_b,) = paired.ratios(np.ones((1, n)))
    values = {
        "a": float(pooled_a),
        "b": float(pooled_b),
        "ratio": float(pooled_a / pooled_b),
        "difference": float(pooled_b - pooled_a),
        "mean_prompt_ratio": float(np.mean(own_a / own_b)),
        "wins_a": int(np.sum(own_a > own_b)),
        "wins_b": int(np.sum(own_b > own_a)),
        "ties": int(np.sum(own_a == own_b)),
    }
    if n > 1:
        lengths_a, lengths_b = paired.ratios(_weights(n, seed))
        values["ratio_interval"] = _interval(lengths_a / lengths_b)  # type: ignore[assignment]
        values["difference_interval"] = _interval(lengths_b - lengths_a)  # type: ignore[assignment]
    return base.model_copy(update=values)


def _overall(
    temperature: float,
    pairs: Sequence[PairFigures],
    paired: Sequence[_Paired],
    names: tuple[str, str],
    seed: int,
) -> Overall | None:
    rows = [(p.task, p.a, p.b) for p in pairs if p.a is not None and p.b is not None]
    if not rows:
        return None
    ratio, mean = table_averages(rows)
    interval = None
    usable = [p for p in paired if len(p.counts)]
    if len(usable) == len(rows) and all(len(p.counts) > 1 for p in usable):
        drawn = [p.ratios(_weights(len(p.counts), seed + i)) for i, p in enumerate(usable)]
        means = [np.mean([d[side] for d in drawn], axis=0) for side in (0, 1)]
        interval = _interval(means[0] / means[1])
    verdict = verdict_of(temperature, pairs, ratio, interval, names)
    return Overall(
        temperature=temperature,
        benchmarks=len(rows),
        ratio_of_means=ratio,
        mean_of_ratios=mean,
        ratio_of_means_interval=interval,
        verdict=verdict,
    )


def verdict_of(
    temperature: float,
    pairs: Sequence[PairFigures],
    ratio: float,
    interval: Interval | None,
    names: tuple[str, str],
) -> str:
    """One sentence that says no more than the numbers do."""
    prompts = sum(p.prompts for p in pairs)
    over = f"over {prompts} prompts of {len(pairs)} benchmarks at T = {temperature:g}"
    if interval is None:
        return (
            f"No verdict {over}: without two paired prompts of every benchmark there is no "
            f"interval; the ratio of means {ratio:.3f} may be chance."
        )
    told = f"({names[0]} / {names[1]} = {ratio:.3f}, 95 % {interval[0]:.3f} to {interval[1]:.3f})"
    few = [p.title for p in pairs if p.prompts < LEAST_PROMPTS]
    if interval[0] <= 1 <= interval[1]:
        text = f"No difference in acceptance length is shown {over} {told}."
    elif few:
        text = (
            f"No verdict {over} {told}: with fewer than {LEAST_PROMPTS} prompts of "
            f"{', '.join(few)}, an interval this side of 1 may be chance."
        )
    else:
        better = names[0] if ratio > 1 else names[1]
        text = f"{better} has the larger mean acceptance length {over} {told}."
        lost = [
            p.title
            for p in pairs
            if p.ratio_interval and (p.ratio_interval[0] > 1) != (ratio > 1)
            and not p.ratio_interval[0] <= 1 <= p.ratio_interval[1]
        ]  # fmt: skip
        if lost:
            text += f" The other one is ahead on {', '.join(lost)}."
    unequal = sum(i.of - i.same for p in pairs for i in p.identity)
    if unequal:
        text += f" {unequal} greedy answers differ, so not all counts are on equal texts."
    return f"{text} On this stack and these prompts only; speed is another question."


def _hash_identity(a: ArmFigures, b: ArmFigures, names: tuple[str, str]) -> list[Identity]:
    if a.temperature > 0:
        return []
    others = {row.key: row for row in b.prompts}
    rows: list[tuple[PromptRow, PromptRow]] = [
        (row, others[row.key]) for row in a.prompts if row.key in others
    ]
    answers = [
        (row.id, turn, one, other)
        for row, second in rows
        for turn, (one, other) in enumerate(zip(row.digests, second.digests, strict=False))
    ]
    apart = [Divergence(question=q, turn=t) for q, t, one, other in answers if one != other]
    return [
        Identity(
            first=names[0],
            second=names[1],
            same=len(answers) - len(apart),
            of=len(answers),
            divergences=tuple(apart[:MOST_DIVERGENCES]),
        )
    ]


def _weights(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES)


def _interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
