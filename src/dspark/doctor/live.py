"""The draft beside its target: is it run the way it was trained, and does it draft as promised?

The target answers a few prompts through the engine that was handed in. Those answers give the
acceptance length that is compared with the expected one, and the examples on which
:mod:`dspark.doctor.probe` tries one mistaken convention after another. A convention that fits
better than the declared one, by more than chance, is the diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dspark.decoding.acceptance import bootstrap_interval
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import Generation
from dspark.doctor.conventions import FAMILIES, Family
from dspark.doctor.engine import LiveEngine, Text, check_taps
from dspark.doctor.findings import Check, failed, passed, skipped, warned
from dspark.doctor.probe import Convention, Example, Probe, Score, beats
from dspark.model.draft import DSparkDraft
from dspark.model.target import Target

STATES = "the target's final norm is applied once, and its states give its own greedy tokens"
IDENTITY = "at temperature 0 the text with the draft is the text without it"
ACCEPTANCE = "the acceptance length is the expected one"
NEEDED_AGREEMENT = 0.99
PLAIN_PROMPTS = 4
EXAMPLES = 16
"""Answers that conventions are tried on, a dozen blocks of each: with 8 a draft that is fond of one
layer more than of its neighbour could not be told from chance."""
TOLERATED = 0.8
"""Share of the expected acceptance length that the interval must reach."""
USELESS = 1.1
"""Below this acceptance length a draft drafts nothing, whatever was expected."""


@dataclass(frozen=True)
class Expected:
    """An acceptance length and where it was measured. ``same_prompts``: on prompts of the very
    workload that is decoded now, at temperature 0; otherwise only of the same order."""

    length: float
    where: str
    same_prompts: bool


@dataclass(frozen=True)
class Patient:
    """A draft, its target and what is known of them.

    ``engine`` decodes and hands out states, ``target`` judges them; ``prompts`` are ids; ``masks``
    other ids that MASK may have been, with their names.
    """

    draft: DSparkDraft
    target: Target
    engine: LiveEngine
    prompts: Sequence[list[int]]
    masks: Mapping[int, str]
    expected: Expected | None
    max_new_tokens: int = 64


def layers_to_tap(ids: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The declared layers and their neighbours, as far as they can be tapped."""
    near = {i + d for i in ids for d in (-1, 0, 1)}
    return tuple(sorted(i for i in near if 0 <= i <= depth - 2))


def examine_live(patient: Patient, on_step: Callable[[], None] = lambda: None) -> list[Check]:
    """All live checks; ``on_step`` is called once per decoded prompt and per convention."""
    params = SamplingParams(max_new_tokens=patient.max_new_tokens)
    drafted = []
    for answer in patient.engine.drafted(patient.prompts, params):
        drafted.append(answer)
        on_step()
    texts = [
        Text([*prompt, *answer.ids], len(prompt))
        for prompt, answer in zip(patient.prompts[:EXAMPLES], drafted, strict=False)
    ]
    plain, examples = patient.engine.observed(patient.prompts[:PLAIN_PROMPTS], params, texts)
    declared = patient.draft.config.target_layer_ids
    engine = [] if patient.engine.ours else [check_taps(patient.target, declared, examples)]
    return [
        *engine,
        _states(patient.target, examples, plain),
        _identity(drafted, plain),
        *_conventions(patient, examples, on_step),
        check_acceptance(patient.expected, drafted),
    ]


@torch.inference_mode()
def _states(target: Target, examples: list[Example], plain: list[Generation]) -> Check:
    agree = total = 0
    worst = 0.0
    for example, answer in zip(examples, plain, strict=False):
        once = target.norm(example.before)
        size = example.final.float().norm().clamp_min(1e-6)
        worst = max(worst, float((once - example.final).float().norm() / size))
        start = example.prompt_length - 1
        count = min(len(answer.ids), len(example.ids) - start - 1)
        greedy = target.logits(example.final[start : start + count]).argmax(-1).cpu()
        agree += int((greedy == torch.tensor(answer.ids[:count])).sum())
        total += count
    share = agree / max(total, 1)
    found = f"{share:.1%} of {total} tokens, final state {worst:.1e} from norm(state before)"
    if total and share >= NEEDED_AGREEMENT and worst < 0.02:
        return passed("live.states", STATES, found)
    return failed(
        "live.states", STATES, found,
        "the states come from the wrong side of the norm, from another layer or another model",
        "Do not train or serve on this target before its states reproduce its own tokens.",
        "TorchSpec #169",
    )  # fmt: skip


def _identity(drafted: list[Generation], plain: list[Generation]) -> Check:
    pairs = list(zip(drafted, plain, strict=False))
    same = sum(a.ids == b.ids for a, b in pairs)
    found = f"{same} of {len(pairs)} prompts"
    if same == len(pairs):
        return passed("live.identity", IDENTITY, found)
    return failed(
        "live.identity", IDENTITY, found,
        "verifying a block rounds otherwise than decoding token by token (bf16), or the engine's "
        "rows are wrong", "Repeat in float32; if it stays, report it: the engine is at fault.",
    )  # fmt: skip


def _conventions(
    patient: Patient, examples: list[Example], on_step: Callable[[], None]
) -> list[Check]:
    """One check per family of mistakes, all against one declared score."""
    draft = patient.draft
    probe = Probe(examples, patient.target.head_weight(), draft.config.block_size)
    families = [family for family in FAMILIES if family.applies(draft)]
    if len(probe.examples) < 2:
        why = f"{len(probe.examples)} answers are long enough for a block; two are needed"
        return [skipped(family.id, family.asked, why) for family in families]
    declared = probe.score(draft, Convention())
    tried: dict[str, dict[str, Score]] = {}
    for family in families:
        scores = tried[family.id] = {}
        made = family.alternatives(draft, patient.masks, examples)
        for name, (twin, convention) in made.items():
            scores[name] = probe.score(twin, convention)
            on_step()
    best = best_fit(declared, tried)
    return [_judge(family, declared, tried[family.id], best) for family in families]


def best_fit(declared: Score, tried: Mapping[str, Mapping[str, Score]]) -> str | None:
    """The family whose convention fits the draft best, if any fits better than the declared one.

    A draft run in a wrong way often does a little better in another wrong way too; only the best
    explanation is the diagnosis.
    """
    found = {
        id: max(scores.values(), key=lambda s: s.length).length
        for id, scores in tried.items()
        if any(beats(score, declared) for score in scores.values())
    }
    return max(found, key=lambda id: found[id]) if found else None


def _judge(family: Family, declared: Score, tried: Mapping[str, Score], best: str | None) -> Check:
    if not tried:
        return skipped(family.id, family.asked, "nothing else to compare with")
    told = ", ".join(f"{name} {score.length:.2f}" for name, score in tried.items())
    found = f"declared {declared.length:.2f}, {told}"
    better = [name for name, score in tried.items() if beats(score, declared)]
    if not better and declared.length < USELESS:
        return skipped(family.id, family.asked, f"{found}: the draft fits none, nothing to tell")
    if not better and not all(beats(declared, score) for score in tried.values()):
        found += "; some cannot be told apart with this draft on this text"
    if not better:
        return passed(family.id, family.asked, found)
    name = max(better, key=lambda name: tried[name].length)
    if family.id == best:
        return failed(
            family.id, family.asked, found, f"the draft fits better with {name}: {family.cause}",
            family.mend, family.source,
        )  # fmt: skip
    return warned(
        family.id, family.asked, found, f"{name} fits better too, but {best} explains more",
        f"Mend {best} first and examine again.",
    )  # fmt: skip


def check_acceptance(expected: Expected | None, drafted: list[Generation]) -> Check:
    counters = [g.counter for g in drafted if g.counter is not None and g.counter.steps]
    if not counters:
        return skipped("live.acceptance", ACCEPTANCE, "no verify step: answers of one token")
    pairs = [(c.accepted, c.steps) for c in counters]
    length = 1 + sum(a for a, _ in pairs) / sum(s for _, s in pairs)
    low, high = bootstrap_interval(pairs, seed=0)
    found = f"{length:.2f} ({low:.2f} to {high:.2f}) on {len(pairs)} prompts"
    mend = "See the other failed checks for the cause; without any, the draft was trained on other "
    mend += "text or too little: train it on this workload."
    if length < USELESS:
        return failed(
            "live.acceptance", ACCEPTANCE, f"{found}: nothing is accepted",
            "the draft drafts rubbish: wrong layout, layers, embedding or weights", mend,
        )  # fmt: skip
    if expected is None:
        return warned(
            "live.acceptance", ACCEPTANCE, f"{found}, nothing to compare with",
            "neither a bench nor a training figure travels with this checkpoint",
            "Measure it with `dspark bench` on your workload.",
        )  # fmt: skip
    found += f"; expected {expected.length:.2f} ({expected.where})"
    if high >= TOLERATED * expected.length:
        return passed("live.acceptance", ACCEPTANCE, found)
    if not expected.same_prompts:
        return warned(
            "live.acceptance", ACCEPTANCE, found,
            "the prompts at hand may not be those the draft was trained for",
            "Give --prompts of the draft's own workload.",
        )  # fmt: skip
    return failed(
        "live.acceptance", ACCEPTANCE, found, "something differs between then and now", mend
    )
