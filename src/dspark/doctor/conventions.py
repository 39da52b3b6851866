"""The families of mistakes that are tried on a draft, each with its diagnosis.

A family is one question (which layers? which slot predicts what?) and the wrong answers that public
projects have given to it. ``docs`` of the causes: the reports named as sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dspark.doctor.probe import Convention, Example, rotary_twin, yarn_twins
from dspark.model.draft import DSparkDraft

Trial = tuple[DSparkDraft, Convention]
Maker = Callable[[DSparkDraft, Mapping[int, str], Sequence[Example]], dict[str, Trial]]


@dataclass(frozen=True)
class Family:
    """``alternatives`` makes (draft or its twin, convention) by name; ``applies`` may leave the
    question out for a kind of draft."""

    id: str
    asked: str
    cause: str
    mend: str
    source: str
    alternatives: Maker
    applies: Callable[[DSparkDraft], bool] = lambda _: True


def _layers(
    draft: DSparkDraft, _masks: Mapping[int, str], examples: Sequence[Example]
) -> dict[str, Trial]:
    """The ids one lower and one higher; an id that cannot move keeps its place."""
    ids, held = draft.config.target_layer_ids, examples[0].states
    out: dict[str, Trial] = {}
    for name, step in (("layers one lower", -1), ("layers one higher", 1)):
        moved = tuple(i + step if i + step in held else i for i in ids)
        if moved != ids:
            out[f"{name} {list(moved)}"] = (draft, Convention(layers=moved))
    return out


def _layout(draft: DSparkDraft, *_: object) -> dict[str, Trial]:
    return {"a 1+N fill-in block": (draft, Convention(fill_in=True))}


def _labels(draft: DSparkDraft, *_: object) -> dict[str, Trial]:
    return {"labels one token later": (draft, Convention(shift=1))}


def _norm(draft: DSparkDraft, *_: object) -> dict[str, Trial]:
    return {"states before the final norm": (draft, Convention(supervision="pre"))}


def _mask(draft: DSparkDraft, masks: Mapping[int, str], _: object) -> dict[str, Trial]:
    return {
        f"MASK = {i} {name}": (draft, Convention(mask=i))
        for i, name in masks.items()
        if i != draft.config.mask_token_id
    }


def _rope(draft: DSparkDraft, *_: object) -> dict[str, Trial]:
    name, other = rotary_twin(draft)
    twins = {name: other, **yarn_twins(draft)}
    return {name: (twin, Convention()) for name, twin in twins.items()}


FAMILIES: tuple[Family, ...] = (
    Family(
        "live.layers", "the declared layers are the trained ones",
        "ids were shifted by one between capture, config and serving",
        "Write the ids the draft fits best; count from 0, state after the layer.",
        "vllm-project/speculators #705, TorchSpec #87", _layers,
    ),
    Family(
        "live.layout", "the draft was trained anchor-first",
        "its MASK rows predict their own position, which is the layout of another method",
        "It cannot be served as a DSpark draft: train it with sample_from_anchor true.",
        "sgl-project/sglang #30852, vllm-project/vllm #56792", _layout,
    ),
    Family(
        "live.labels", "slot k predicts the token at a + k + 1",
        "labels were shifted against inference while the loss looked excellent",
        "Train again with aligned labels.", "SpecForge #455", _labels,
    ),
    Family(
        "live.norm", "the draft learnt from states after the target's final norm",
        "it was distilled from states before the norm", "Train again from normed states.",
        "TorchSpec #169", _norm,
    ),
    Family(
        "live.mask", "the declared MASK is the trained one",
        "mask_token_id was guessed or changed after training",
        "Write the id the draft fits best, if it is a reserved one; else train again.",
        "SpecForge #604, Automodel #3238", _mask,
    ),
    Family(
        "live.rope", "the rotary convention is the trained one",
        "weights or rope_parameters follow another convention than the engines'",
        "Restore the rope_parameters of training; permute half-split weights when exporting.",
        "contract, section 3", _rope,
    ),
)  # fmt: skip
