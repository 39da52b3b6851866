"""Counting what speculation gained, and saying how sure we are.

Three counts are kept apart, because published figures mix them: tokens DRAFTED by the block pass,
ADMITTED to verification by the scheduler, and ACCEPTED: drafted tokens that passed the rule and
stayed in the answer. The acceptance length is 1 + accepted / steps: tokens gained per target
forward, at least 1 because each verify step emits one token itself. It is pooled over steps, not
averaged over prompts: only the pooled ratio predicts speed.

An end token inside an accepted run ends the answer: what was accepted behind it is dropped and not
counted, since nobody got it (engines that count before they trim report slightly more). The step
counts whole in steps, drafted and admitted: its work was done. The bonus that it did not emit is
still the 1 of the formula, one token an answer at most.

The rate of slot k is its share of all steps: accepted at k / steps. These rates never rise along
the block and sum to accepted / steps.

Steps of one prompt are correlated, so intervals resample whole prompts, never single steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.errors import DecodingError


@dataclass(frozen=True)
class StepCount:
    """One verify step of one request: ``accepted <= admitted <= drafted``, all >= 0.

    ``accepted`` is what was kept: nothing behind an end token.

    Raises:
        DecodingError: counts out of this order.
    """

    drafted: int
    admitted: int
    accepted: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.admitted <= self.drafted:
            raise DecodingError(
                expected="0 <= accepted <= admitted <= drafted",
                found=f"accepted {self.accepted}, admitted {self.admitted}, drafted {self.drafted}",
                where="step count",
                fix="Count what was kept of a step: accepted tokens up to an end token.",
            )


@dataclass
class AcceptanceCounter:
    """Sums over verify steps of drafts with ``block_size`` slots; starts empty.

    Per slot k (0-based): ``admitted_at[k]`` steps that admitted it, ``accepted_at[k]`` steps that
    accepted and kept it.
    """

    block_size: int
    steps: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    admitted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise _error("block_size >= 1", f"{self.block_size}", "Use the draft's block size.")
        for name in ("admitted_at", "accepted_at"):
            counts = getattr(self, name) or [0] * self.block_size
            if len(counts) != self.block_size:
                expected = f"{self.block_size} slots in {name}"
                raise _error(expected, f"{len(counts)}", "Read back a counter of this block size.")
            setattr(self, name, list(counts))

    def add(self, step: StepCount) -> None:
        """Count one verify step.

        Raises:
            DecodingError: it drafted more tokens than the block has slots.
        """
        if step.drafted > self.block_size:
            expected = f"at most {self.block_size} drafted tokens per step"
            raise _error(expected, f"{step.drafted}", "Use the draft's block size.")
        self.steps += 1
        self.drafted += step.drafted
        self.admitted += step.admitted
        self.accepted += step.accepted
        for slot in range(step.admitted):
            self.admitted_at[slot] += 1
            self.accepted_at[slot] += step.accepted > slot

    def merge(self, other: AcceptanceCounter) -> None:
        """Add another counter's sums to this one.

        Raises:
            DecodingError: another block size.
        """
        if other.block_size != self.block_size:
            expected, found = f"block_size {self.block_size}", f"{other.block_size}"
            raise _error(expected, found, "Report drafts of different block sizes apart.")
        self.steps += other.steps
        self.drafted += other.drafted
        self.admitted += other.admitted
        self.accepted += other.accepted
        for mine, theirs in (
            (self.admitted_at, other.admitted_at),
            (self.accepted_at, other.accepted_at),
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps, in tokens per verify step (>= 1).

        Raises:
            DecodingError: no step was counted; there is no such number.
        """
        if self.steps == 0:
            raise _error("at least one verify step", "none", "Check `steps` before reporting.")
        return 1.0 + self.accepted / self.steps


def bootstrap_interval(
    per_prompt: Sequence[tuple[int, int]], seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the pooled acceptance length, over prompts.

    Args:
        per_prompt: (accepted, steps) of each prompt. Prompts without steps carry no information
            and are left out.
        seed: of the resampling.
        level: coverage in (0, 1).
        resamples: number of bootstrap samples.

    Returns:
        (low, high) of 1 + sum(accepted) / sum(steps). One prompt gives an empty width: the caller
        should say that n = 1.

    Raises:
        DecodingError: no prompt with steps, negative counts, or senseless level or resamples.
    """
    fix = "Pass one (accepted, steps) pair per prompt."
    if not 0 < level < 1 or resamples < 1:
        found = f"level {level}, resamples {resamples}"
        raise _error("0 < level < 1 and resamples >= 1", found, "Use the defaults.")
    for accepted, steps in per_prompt:
        if accepted < 0 or steps < 0 or (steps == 0 and accepted > 0):
            expected = "non-negative counts, and no accepted tokens without steps"
            raise _error(expected, f"accepted {accepted}, steps {steps}", fix)
    counts = np.array([pair for pair in per_prompt if pair[1] > 0], dtype=np.int64).reshape(-1, 2)
    n = len(counts)
    if n == 0:
        raise _error("at least one prompt with verify steps", "none", fix)
    # How often each prompt appears in a resample of n; one row per resample.
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    sums = weights @ counts
    lengths = 1.0 + sums[:, 0] / sums[:, 1]
    low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def difference_interval(
    first: Sequence[tuple[int, int]],
    second: Sequence[tuple[int, int]],
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float, float]:
    """Acceptance length of ``second`` minus that of ``first``, on the same prompts.

    Paired: a resample draws prompts, and both drafts' counts come with them, so that what is hard
    about a prompt cancels. Prompts without steps of both drafts are left out.

    Returns:
        (difference, low, high) in tokens per verify step.

    Raises:
        DecodingError: different numbers of prompts, none with steps, or senseless level.
    """
    fix = "Pass one (accepted, steps) pair per prompt for each draft, in the same order."
    if len(first) != len(second) or not 0 < level < 1 or resamples < 1:
        found = f"{len(first)} and {len(second)} prompts, level {level}, resamples {resamples}"
        raise _error("as many prompts of both, 0 < level < 1", found, fix)
    pairs = [(*a, *b) for a, b in zip(first, second, strict=True) if a[1] > 0 and b[1] > 0]
    if not pairs:
        raise _error("at least one prompt with verify steps of both", "none", fix)
    counts, n = np.array(pairs, dtype=np.int64), len(pairs)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    sums = np.vstack([counts.sum(0), weights @ counts])
    differences = sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
    low, high = np.quantile(differences[1:], [(1 - level) / 2, (1 + level) / 2])
    return float(differences[0]), float(low), float(high)


def trim_at_end(tokens: Sequence[int], end_ids: Collection[int]) -> tuple[list[int], bool]:
    """Cut a run of emitted tokens after its first end token, which is kept.

    A block may accept tokens beyond the end of the answer; nothing after it may reach the user,
    the logprobs or the usage count. Returns (kept tokens, whether an end token was seen).
    """
    for index, token in enumerate(tokens):
        if token in end_ids:
            return list(tokens[: index + 1]), True
    return list(tokens), False


def _error(expected: str, found: str, fix: str) -> DecodingError:
    return DecodingError(expected=expected, found=found, where="acceptance statistics", fix=fix)
