"""Losslessness of schedulers, by the same enumeration as that of verification rules.

A scheduler is exact when the width it chooses does not know the tokens it has not admitted. That is
a property of the whole decoder, so the whole decoder is enumerated, with confidences that depend on
the drafted prefix as a head's do, and cost curves with cliffs where schedulers differ most:

* one block (:func:`scheduled_width` with ``dspark.decoding.enumeration.joint_error``);
* many blocks in a row, each budget made from confidences two steps old (:func:`steps_error`);
* two requests that share a step, where one's width depends on the other's drafts
  (:func:`shared_error`).

:func:`counterexample` is appendix A of the DSpark paper: a scheduler that searches all widths of
the live confidences (:func:`looking_ahead`) emits 0.85 / 0.15 for a target of 0.7 / 0.3.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dspark.decoding import schedule
from dspark.decoding.enumeration import (
    BLOCK,
    MODES,
    History,
    Joint,
    Model,
    ToyDecoder,
    V,
    Width,
    cells,
    honest,
    joint_error,
    paths,
)
from dspark.decoding.params import SchedulerName
from dspark.decoding.schedule import Floats, Ints

Confidence = Callable[[History], float]
"""Of the slot behind a drafted prefix; never told the token that is drawn for it."""

SCHEDULERS: tuple[SchedulerName, ...] = ("fixed", "threshold", "sync", "async")
THRESHOLD = 0.4
# Seconds by tokens: smooth, a cliff behind the first token, and a flat stretch behind a cliff.
CURVES: tuple[Floats, ...] = (
    np.array([0.0, 1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 3.7, 4.5]),
    np.array([0.0, 1.0, 1.9, 1.9, 1.9, 1.9, 3.8, 3.8, 3.8]),
    np.array([0.0, 1.0, 1.1, 1.1, 2.6, 2.6, 2.6, 2.7, 2.8]),
)


def random_confidence(seed: int) -> Confidence:
    """Confidences that depend on the whole drafted prefix, some of them equal."""

    @cache
    def confidence(prefix: History) -> float:
        numbers = np.random.default_rng([seed, 7, *(token + 1 for token in prefix)])
        return float(np.round(numbers.beta(2.0, 1.0), 1))

    return confidence


def survival_of(path: History, confidence: Confidence) -> Floats:
    """[1, K] of one drafted block."""
    return schedule.survivals(np.array([[confidence(path[:k]) for k in range(len(path))]]))


def scheduled_width(
    scheduler: SchedulerName, confidence: Confidence, seconds: Floats, budget: int = 2
) -> Width:
    """The width that ``scheduler`` gives one request alone; ``budget`` is the ``async`` one's."""

    def width(path: History) -> int:
        survival = survival_of(path, confidence)
        return int(_widths(scheduler, survival, seconds, budget)[0])

    return width


def looking_ahead(confidence: Confidence, seconds: Floats) -> Width:
    """The best width of the LIVE confidences: what must not be done."""
    return lambda path: schedule.budget(survival_of(path, confidence), seconds)


def counterexample() -> tuple[ToyDecoder, Confidence, Floats]:
    """Target 0.7 / 0.3, draft 0.5 / 0.5; behind token 0 the draft is sure, behind token 1 hopeless;
    a step of two tokens costs as much as one of three."""
    first = torch.tensor([0.7, 0.3], dtype=torch.float64)
    flat = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def p(text: History) -> Tensor:
        return first if not text else flat

    def confidence(prefix: History) -> float:
        return 0.8 if not prefix else (1.0 if prefix[0] == 0 else 0.0)

    decoder = ToyDecoder("standard", p, lambda _: flat, lambda _: flat)
    return decoder, confidence, np.array([0.0, 1.0, 2.0, 2.0])


def first_token(decoder: ToyDecoder, width: Width, block: int = 2) -> list[float]:
    """Distribution of the first token that ``decoder`` emits, over two tokens."""
    chances = [0.0, 0.0]
    for path, weight in paths(decoder.drafts_from, block, 2):
        for accepted, next_probs, chance in _decisions(decoder, (), path[: width(path)]):
            if accepted:
                chances[path[0]] += weight * chance
            else:
                for token in range(2):
                    chances[token] += weight * chance * float(next_probs[token])
    return chances


def steps_error(
    decoder: ToyDecoder,
    scheduler: SchedulerName,
    confidence: Confidence,
    seconds: Floats,
    length: int = 3,
) -> float:
    """Largest error of any text of ``length`` tokens when EVERY step drafts and is scheduled.

    Each step's budget comes from the confidences of the block two steps before it (all slots, in
    the first two), rejected tokens included: what an engine knows.
    """
    decide = cache(lambda text, ids: list(_decisions(decoder, text, ids)))
    # (text, budget of the next step, of the one behind it) -> probability
    states: dict[tuple[History, int, int], float] = {((), BLOCK, BLOCK): 1.0}
    joint: Joint = defaultdict(float)
    while states:
        following: dict[tuple[History, int, int], float] = defaultdict(float)
        for (text, now, later), mass in states.items():
            block = min(BLOCK, length - len(text))
            for path, drawn in paths(_behind(decoder.drafts_from, text), block):
                survival = survival_of((*text, *path), confidence)[:, len(text) :]
                width = int(_widths(scheduler, survival, seconds, now)[0])
                made = schedule.budget(survival, seconds)
                for accepted, next_probs, chance in decide(text, path[:width]):
                    for token, q in enumerate(next_probs.tolist()):
                        if q == 0:
                            continue
                        out = (*text, *path[:accepted], token)[:length]
                        weight = mass * drawn * chance * q
                        if len(out) == length:
                            joint[out] += weight
                        else:
                            following[out, later, made] += weight
        states = following
    return _difference(joint, decoder.p, length)


def shared_error(
    decoders: tuple[ToyDecoder, ToyDecoder],
    kinds: tuple[SchedulerName, SchedulerName],
    confidences: tuple[Confidence, Confidence],
    seconds: Floats,
    block: int = 2,
) -> float:
    """Largest error of any PAIR of texts of ``block`` + 1 tokens from two requests in one step.

    The joint must be the product of the targets': neither text may know of the other.
    """
    length = block + 1
    joint: dict[tuple[History, History], float] = defaultdict(float)
    emit = [cache(lambda ids, d=d: _texts(d, ids, length)) for d in decoders]
    drawn = [list(paths(d.drafts_from, block)) for d in decoders]
    for (first, a), (second, b) in itertools.product(*drawn):
        survival = np.concatenate(
            [survival_of(path, c) for path, c in zip((first, second), confidences, strict=True)]
        )
        widths = _shared_widths(kinds, survival, seconds)
        one, two = emit[0](first[: widths[0]]), emit[1](second[: widths[1]])
        for (x, p), (y, q) in itertools.product(one.items(), two.items()):
            joint[x, y] += a * b * p * q
    wanted = [
        {t: _chance(d.p, t) for t in itertools.product(range(V), repeat=length)} for d in decoders
    ]
    return max(
        abs(joint.get((x, y), 0.0) - p * q)
        for (x, p), (y, q) in itertools.product(wanted[0].items(), wanted[1].items())
    )


def largest_error(seeds: range) -> float:
    """Over every scheduler, mode and curve: one block, many steps, and two requests in a step."""
    errors = [0.0]
    for seed, scheduler, mode in itertools.product(seeds, SCHEDULERS, MODES):
        decoder, confidence = honest(mode, seed), random_confidence(seed)
        for seconds in CURVES:
            width = scheduled_width(scheduler, confidence, seconds)
            errors.append(joint_error(decoder, width))
        errors.append(steps_error(decoder, scheduler, confidence, CURVES[seed % len(CURVES)]))
    pairs = itertools.product(SCHEDULERS, SCHEDULERS)
    for number, kinds in enumerate(pairs):
        mode = MODES[number % len(MODES)]
        decoders = honest(mode, 0), honest(mode, 1)
        confidences = random_confidence(0), random_confidence(1)
        errors.append(shared_error(decoders, kinds, confidences, CURVES[number % len(CURVES)]))
    return max(errors)


def _widths(scheduler: SchedulerName, survival: Floats, seconds: Floats, budget: int) -> Ints:
    if scheduler == "threshold":
        return schedule.threshold(survival, THRESHOLD)
    if scheduler == "sync":
        return schedule.sync(survival, seconds)
    if scheduler == "async":
        return schedule.top(survival, budget)
    return np.full(len(survival), survival.shape[1])


def _shared_widths(
    kinds: tuple[SchedulerName, SchedulerName], survival: Floats, seconds: Floats
) -> list[int]:
    """Two requests of these kinds in one step, in the order in which the engine serves kinds."""
    if kinds[0] == kinds[1]:
        return [int(width) for width in _widths(kinds[0], survival, seconds, 2)]
    widths = [0, 0]
    tokens, emitted = 2, 2.0
    order = sorted((0, 1), key=lambda i: ("fixed", "threshold", "async", "sync").index(kinds[i]))
    for row in order:
        own = survival[row : row + 1]
        if kinds[row] == "sync":
            widths[row] = int(schedule.sync(own, seconds, tokens, emitted)[0])
        else:
            widths[row] = int(_widths(kinds[row], own, seconds, 2)[0])
        tokens += widths[row]
        emitted += float(own[0, : widths[row]].sum())
    return widths


def _decisions(
    decoder: ToyDecoder, text: History, ids: History
) -> Iterator[tuple[int, Tensor, float]]:
    """(accepted, distribution of the next token, probability) of verifying ``ids`` behind
    ``text``."""
    n = len(ids)
    p = torch.stack([decoder.p((*text, *ids[:i])) for i in range(n + 1)])
    q = None
    if decoder.q is not None:
        rows = [decoder.q((*text, *ids[:i])) for i in range(n)]
        q = torch.stack(rows) if rows else p.new_zeros(0, p.shape[1])
    drafted = torch.tensor(ids, dtype=torch.int64)
    h = decoder.thresholds(decoder.rule, p, q, drafted).tolist()
    for u, weight in cells(h):
        draws = torch.tensor(u, dtype=torch.float64)
        decision = decoder.decide(decoder.rule, p, q, drafted, draws)
        yield decision.accepted, decision.next_probs, weight


def _texts(decoder: ToyDecoder, ids: History, length: int) -> Joint:
    """Texts of ``length`` tokens after one step that verified ``ids``, continued by the target."""
    joint: Joint = defaultdict(float)
    for accepted, next_probs, weight in _decisions(decoder, (), ids):
        for token, chance in enumerate(next_probs.tolist()):
            if chance == 0:
                continue
            start = (*ids[:accepted], token)
            for rest in itertools.product(range(V), repeat=length - len(start)):
                text = (*start, *rest)
                joint[text] += weight * chance * _chance(decoder.p, text, len(start))
    return joint


def _behind(model: Model, text: History) -> Model:
    return lambda path: model((*text, *path))


def _chance(p: Model, text: History, start: int = 0) -> float:
    return float(np.prod([float(p(text[:i])[text[i]]) for i in range(start, len(text))]))


def _difference(joint: Joint, p: Model, length: int) -> float:
    texts = itertools.product(range(V), repeat=length)
    return max(abs(joint.get(text, 0.0) - _chance(p, text)) for text in texts)
