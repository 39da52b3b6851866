"""Losslessness, by exact enumeration instead of statistics.

On a vocabulary of 3 with a block of 3, every draft path and every pattern of passed and failed
tests is visited with its exact probability, the real ``decide`` is run on it, and the text is
continued with the target until 4 tokens are out. Their joint distribution must be the target's to
rounding. The same enumeration is then given wrong decoders, which single-token statistics would
hardly notice, and must convict each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from dspark.decoding.enumeration import (
    BLOCK,
    FULL,
    MODES,
    TOP_2,
    Decide,
    History,
    ToyDecoder,
    Width,
    argmax_of,
    honest,
    joint_error,
    outcomes,
    random_model,
    width_by_prefix,
)
from dspark.decoding.verify import Decision, Rule, acceptance_thresholds, decide, residual

EXACT, BIASED = 1e-12, 1e-3
SEEDS = range(6)


def assert_convicted(decoders: Iterable[ToyDecoder], width: Width = lambda _: BLOCK) -> None:
    """Wrong for every seed by far more than rounding, and for some by more than a thousandth."""
    errors = [joint_error(decoder, width) for decoder in decoders]
    assert min(errors) > 1e6 * EXACT
    assert max(errors) > BIASED


def mean_accepted(decoder: ToyDecoder) -> float:
    return sum(len(prefix) * weight for prefix, _, weight in outcomes(decoder, lambda _: BLOCK))


@pytest.mark.parametrize("width", range(BLOCK + 1))
@pytest.mark.parametrize("mode", MODES)
def test_joint_distribution_is_the_targets(mode: str, width: int) -> None:
    for seed in SEEDS:
        assert joint_error(honest(mode, seed), lambda _: width) <= EXACT


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_truncated_draft_is_exact_for_an_untruncated_target(rule: Rule) -> None:
    for seed in SEEDS:
        q = random_model(seed + 1000, TOP_2)
        decoder = ToyDecoder(rule, random_model(seed, FULL), q, q)
        assert joint_error(decoder, lambda _: BLOCK) <= EXACT


def width_by_peeking(path: History) -> int:
    """Admit slot k by looking at its own drawn token: forbidden."""
    width = 0
    while width < BLOCK and path[width] != 0:
        width += 1
    return width


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "greedy"])
def test_width_chosen_from_the_prefix_stays_exact(mode: str) -> None:
    for seed in SEEDS:
        assert joint_error(honest(mode, seed), width_by_prefix) <= EXACT


@pytest.mark.parametrize("mode", ["standard/probabilistic", "block/probabilistic"])
def test_width_chosen_by_the_drawn_token_is_convicted(mode: str) -> None:
    assert_convicted((honest(mode, seed) for seed in SEEDS), width_by_peeking)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_argmax_draft_tested_against_softmax_is_convicted(rule: Rule) -> None:
    models = [(random_model(seed, FULL), random_model(seed + 1000, FULL)) for seed in SEEDS]
    assert_convicted(ToyDecoder(rule, p, argmax_of(q), q) for p, q in models)


def block_that_stops_early(
    rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor
) -> Decision:
    passed = (u <= acceptance_thresholds(rule, p, q, ids)).tolist()
    accepted = passed.index(False) if False in passed else len(passed)
    return block_residual(p, q, ids, accepted, scaled=True)


def block_without_scale(
    rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor
) -> Decision:
    passed = (u <= acceptance_thresholds(rule, p, q, ids)).tolist()
    accepted = max((i for i, good in enumerate(passed, 1) if good), default=0)
    return block_residual(p, q, ids, accepted, scaled=False)


def block_residual(
    p: Tensor, q: Tensor | None, ids: Tensor, accepted: int, scaled: bool
) -> Decision:
    assert q is not None
    if accepted == len(ids):
        return Decision(accepted, p[accepted])
    r = 1.0
    for i in range(accepted):
        r = min(1.0, r * float(p[i, ids[i]]) / float(q[i, ids[i]]))
    return Decision(accepted, residual(p[accepted], q[accepted], r if scaled else 1.0))


@pytest.mark.parametrize("wrong", [block_that_stops_early, block_without_scale])
def test_wrong_block_rule_is_convicted(wrong: Decide) -> None:
    models = [(random_model(seed, FULL), random_model(seed + 1000, FULL)) for seed in SEEDS]
    assert_convicted(ToyDecoder("block", p, q, q, decide=wrong) for p, q in models)


def test_residual_of_the_wrong_distribution_is_convicted() -> None:
    """A rejection that falls back to p itself, a mistake that looks harmless."""

    def resample_from_p(
        rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor
    ) -> Decision:
        accepted = decide(rule, p, q, ids, u).accepted
        return Decision(accepted, p[accepted])

    models = [(random_model(seed, FULL), random_model(seed + 1000, FULL)) for seed in SEEDS]
    assert_convicted(ToyDecoder("standard", p, q, q, decide=resample_from_p) for p, q in models)


def test_block_accepts_at_least_as_much_as_standard_and_often_more() -> None:
    gains = []
    for seed in range(12):
        p, q = random_model(seed, FULL), random_model(seed + 1000, FULL)
        gains.append(
            mean_accepted(ToyDecoder("block", p, q, q))
            - mean_accepted(ToyDecoder("standard", p, q, q))
        )
    assert min(gains) >= -EXACT
    assert sum(gain > 1e-3 for gain in gains) >= 6


def test_standard_accepts_the_overlap_of_p_and_q() -> None:
    """One slot: expected acceptance is sum_v min(p, q), the quantity that training maximises."""
    for seed in SEEDS:
        p, q = random_model(seed, FULL), random_model(seed + 1000, FULL)
        overlap = float(torch.minimum(p(()), q(())).sum())
        for rule in ("standard", "block"):
            decoder = ToyDecoder(rule, p, q, q)
            found = sum(len(a) * w for a, _, w in outcomes(decoder, lambda _: 1))
            assert found == pytest.approx(overlap, abs=EXACT)
