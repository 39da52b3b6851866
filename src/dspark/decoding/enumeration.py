"""Losslessness by exact enumeration instead of statistics.

On a vocabulary of 3 with a block of 3, every draft path and every pattern of passed and failed
tests is visited with its exact probability, the real ``decide`` is run on it, and the text is
continued with the target until 4 tokens are out. Their joint distribution must be the target's to
rounding. Distributions depend on the whole history, so a rule that only gets marginals right shows.

``dspark verify`` runs this; the tests also give it wrong decoders and see each of them convicted.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.params import SamplingParams
from dspark.decoding.sampling import target_probabilities
from dspark.decoding.verify import Decision, Rule, acceptance_thresholds, decide

V, BLOCK, LENGTH = 3, 3, 4
History = tuple[int, ...]
Model = Callable[[History], Tensor]
Decide = Callable[[Rule, Tensor, Tensor | None, Tensor, Tensor], Decision]
Width = Callable[[History], int]
Joint = dict[History, float]

FULL = SamplingParams(temperature=1.0)
TOP_2 = SamplingParams(temperature=0.8, top_k=2)
GREEDY = SamplingParams()


@dataclass(frozen=True)
class ToyDecoder:
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
    """Probability of every text of ``LENGTH`` tokens under the target alone."""
    joint: Joint = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        joint[text] = float(np.prod([float(p(text[:i])[text[i]]) for i in range(LENGTH)]))
    return joint


def paths(drafts_from: Model, length: int, vocabulary: int = V) -> Iterator[tuple[History, float]]:
    """Every block the draft can draw, with its probability."""
    for path in itertools.product(range(vocabulary), repeat=length):
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


def outcomes(decoder: ToyDecoder, width: Width) -> Iterator[tuple[History, Decision, float]]:
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


def emitted_joint(decoder: ToyDecoder, width: Width) -> Joint:
    """Probability of every text of ``LENGTH`` tokens when its first block is speculated."""
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


def joint_error(decoder: ToyDecoder, width: Width) -> float:
    """Largest difference between the emitted and the target's probability of any text."""
    wanted, found = target_joint(decoder.p), emitted_joint(decoder, width)
    return max(abs(found.get(text, 0.0) - wanted[text]) for text in wanted)


def honest(mode: str, seed: int) -> ToyDecoder:
    """The decoder of :data:`MODES` as dspark runs it, on random models."""
    if mode == "greedy":
        p, q = random_model(seed, GREEDY), random_model(seed + 1000, GREEDY)
        # Half of the drafts agree with the target, so that long prefixes are visited too.
        drafts = q if seed % 2 else p
        return ToyDecoder("greedy", p, drafts, None)
    rule, _, draft = mode.partition("/")
    params = TOP_2 if draft == "top_k" else FULL
    p, q = random_model(seed, params), random_model(seed + 1000, params)
    if draft == "one-hot":
        return ToyDecoder("standard", p, argmax_of(q), None)
    return ToyDecoder("block" if rule == "block" else "standard", p, q, q)


def width_by_prefix(path: History) -> int:
    """Admit slot k by looking only at the tokens before it, as a confidence head does."""
    width = 1
    while width < BLOCK and (sum(path[:width]) + width) % 3 != 0:
        width += 1
    return width


MODES = (
    "standard/probabilistic",
    "standard/top_k",
    "standard/one-hot",
    "block/probabilistic",
    "block/top_k",
    "greedy",
)
