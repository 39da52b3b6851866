"""Losslessness, by exact enumeration instead of statistics.

On a vocabulary of 3 with a block of 3, every draft path and every pattern of passed and failed
tests is visited with its exact probability, the real ``decide`` is run on it, and the text is
continued with the target until 4 tokens are out. Their joint distribution must be the target's to
rounding. The same enumeration is then given wrong decoders, which single-token statistics would
hardly notice, and must convict each of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding.params import SamplingParams
from dspark.decoding.sampling import target_probabilities
from dspark.decoding.verify import (
    Decision,
    Rule,
    acceptance_thresholds,
    decide,
    residual,
)

V, BLOCK, LENGTH = 3, 3, 4
EXACT, BIASED = 1e-12, 1e-3
SEEDS = range(6)
History = tuple[int, ...]
Model = Callable[[History], Tensor]
Decide = Callable[[Rule, Tensor, Tensor | None, Tensor, Tensor], Decision]
Width = Callable[[History], int]
Joint = dict[History, float]

FULL = SamplingParams(temperature=1.0)
TOP_2 = SamplingParams(temperature=0.8, top_k=2)
GREEDY = SamplingParams()


@dataclass(frozen=True)
class Decoder:
    """One speculative decoder under test. ``drafts_from`` generates, ``q`` is what it claims."""

    rule: Rule
    p: Model
    drafts_from: Model
    q: Model | None
    decide: Decide = decide
    thresholds: Callable[..., Tensor] = acceptance_thresholds


def random_model(seed: int, params: SamplingParams) -> Model:
    """A distribution that depends on the whole history, through the real processors."""

    @cache
    def model(history: History) -> Tensor:
        numbers = np.random.default_rng([seed, *(token + 1 for token in history)])
        logits = torch.from_numpy(numbers.normal(scale=1.5, size=V))
        return target_probabilities(logits, params)

    return model


def argmax_of(model: Model) -> Model:
    return lambda history: torch.eye(V, dtype=torch.float64)[int(model(history).argmax())]


def target_joint(p: Model) -> Joint:
    joint: Joint = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        joint[text] = float(np.prod([float(p(text[:i])[text[i]]) for i in range(LENGTH)]))
    return joint


def paths(drafts_from: Model, length: int) -> Iterator[tuple[History, float]]:
    """Every block the draft can draw, with its probability."""
    for path in itertools.product(range(V), repeat=length):
        weight = 1.0
        for i, token in enumerate(path):
            weight *= float(drafts_from(path[:i])[token])
        if weight > 0:
            yield path, weight


def cells(thresholds: list[float]) -> Iterator[tuple[list[float], float]]:
    """Uniforms in the middle of every accept/reject cell, with the cell's probability."""
    for pattern in itertools.product((True, False), repeat=len(thresholds)):
        pairs = list(zip(pattern, thresholds, strict=True))
        weight = float(np.prod([h if passes else 1 - h for passes, h in pairs]))
        if weight > 0:
            yield [h / 2 if passes else (1 + h) / 2 for passes, h in pairs], weight


def outcomes(decoder: Decoder, width: Width) -> Iterator[tuple[History, Decision, float]]:
    """(accepted prefix, decision, probability) of everything one verify step can do."""
    for path, path_weight in paths(decoder.drafts_from, BLOCK):
        ids = path[: width(path)]
        n = len(ids)
        p = torch.stack([decoder.p(ids[:i]) for i in range(n + 1)])
        q = None
        if decoder.q is not None:
            rows = [decoder.q(ids[:i]) for i in range(n)]
            q = torch.stack(rows) if rows else torch.zeros(0, V, dtype=torch.float64)
        drafted = torch.tensor(ids, dtype=torch.int64)
        h = decoder.thresholds(decoder.rule, p, q, drafted).tolist()
        for u, weight in cells(h):
            draws = torch.tensor(u, dtype=torch.float64)
            decision = decoder.decide(decoder.rule, p, q, drafted, draws)
            yield ids[: decision.accepted], decision, path_weight * weight


def emitted_joint(decoder: Decoder, width: Width) -> Joint:
    joint: Joint = defaultdict(float)

    def extend(text: History, weight: float) -> None:
        if len(text) == LENGTH:
            joint[text] += weight
            return
        for token, probability in enumerate(decoder.p(text).tolist()):
            if probability > 0:
                extend((*text, token), weight * probability)

    for prefix, decision, weight in outcomes(decoder, width):
        for token, probability in enumerate(decision.next_probs.tolist()):
            if probability > 0:
                extend((*prefix, token), weight * probability)
    return joint


def joint_error(decoder: Decoder, width: Width) -> float:
    wanted, found = target_joint(decoder.p), emitted_joint(decoder, width)
    return max(abs(found.get(text, 0.0) - wanted[text]) for text in wanted)


def assert_convicted(decoders: Iterable[Decoder], width: Width = lambda _: BLOCK) -> None:
    """Wrong for every seed by far more than rounding, and for some by more than a thousandth."""
    errors = [joint_error(decoder, width) for decoder in decoders]
    assert min(errors) > 1e6 * EXACT
    assert max(errors) > BIASED


def mean_accepted(decoder: Decoder) -> float:
    return sum(len(prefix) * weight for prefix, _, weight in outcomes(decoder, lambda _: BLOCK))


def honest(mode: str, seed: int) -> Decoder:
    if mode == "greedy":
        p, q = random_model(seed, GREEDY), random_model(seed + 1000, GREEDY)
        # Half of the drafts agree with the target, so that long prefixes are visited too.
        drafts = q if seed % 2 else p
        return Decoder("greedy", p, drafts, None)
    rule, _, draft = mode.partition("/")
    params = TOP_2 if draft == "top_k" else FULL
    p, q = random_model(seed, params), random_model(seed + 1000, params)
    if draft == "one-hot":
        return Decoder("standard", p, argmax_of(q), None)
    return Decoder("block" if rule == "block" else "standard", p, q, q)


MODES = [
    "standard/probabilistic",
    "standard/top_k",
    "standard/one-hot",
    "block/probabilistic",
    "block/top_k",
    "greedy",
]


@pytest.mark.parametrize("width", range(BLOCK + 1))
@pytest.mark.parametrize("mode", MODES)
def test_joint_distribution_is_the_targets(mode: str, width: int) -> None:
    for seed in SEEDS:
        assert joint_error(honest(mode, seed), lambda _: width) <= EXACT


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_truncated_draft_is_exact_for_an_untruncated_target(rule: Rule) -> None:
    for seed in SEEDS:
        q = random_model(seed + 1000, TOP_2)
        decoder = Decoder(rule, random_model(seed, FULL), q, q)
        assert joint_error(decoder, lambda _: BLOCK) <= EXACT


def width_by_prefix(path: History) -> int:
    """Admit slot k by looking only at the tokens before it, as a confidence head does."""
    width = 1
    while width < BLOCK and (sum(path[:width]) + width) % 3 != 0:
        width += 1
    return width


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
    assert_convicted(Decoder(rule, p, argmax_of(q), q) for p, q in models)


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
    assert_convicted(Decoder("block", p, q, q, decide=wrong) for p, q in models)


def test_residual_of_the_wrong_distribution_is_convicted() -> None:
    """A rejection that falls back to p itself, a mistake that looks harmless."""

    def resample_from_p(
        rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor
    ) -> Decision:
        accepted = decide(rule, p, q, ids, u).accepted
        return Decision(accepted, p[accepted])

    models = [(random_model(seed, FULL), random_model(seed + 1000, FULL)) for seed in SEEDS]
    assert_convicted(Decoder("standard", p, q, q, decide=resample_from_p) for p, q in models)


def test_block_accepts_at_least_as_much_as_standard_and_often_more() -> None:
    gains = []
    for seed in range(12):
        p, q = random_model(seed, FULL), random_model(seed + 1000, FULL)
        gains.append(
            mean_accepted(Decoder("block", p, q, q)) - mean_accepted(Decoder("standard", p, q, q))
        )
    assert min(gains) >= -EXACT
    assert sum(gain > 1e-3 for gain in gains) >= 6


def test_standard_accepts_the_overlap_of_p_and_q() -> None:
    """One slot: expected acceptance is sum_v min(p, q), the quantity that training maximises."""
    for seed in SEEDS:
        p, q = random_model(seed, FULL), random_model(seed + 1000, FULL)
        overlap = float(torch.minimum(p(()), q(())).sum())
        for rule in ("standard", "block"):
            decoder = Decoder(rule, p, q, q)
            found = sum(len(a) * w for a, _, w in outcomes(decoder, lambda _: 1))
            assert found == pytest.approx(overlap, abs=EXACT)
