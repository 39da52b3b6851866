"""Who runs the target for the live checks: our own engine, or one that hands out its states.

The checks of :mod:`dspark.doctor.live` only see a :class:`LiveEngine`. Another engine's states are
held against those of the target itself, so that a layer too early or a norm too few shows as what
it is, and not as a draft that drafts badly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dspark.decoding.params import SamplingParams
from dspark.decoding.request import Generation, LocalDecoder
from dspark.doctor.findings import Check, failed, passed, skipped
from dspark.doctor.probe import EMBEDDING_LAYER, Example
from dspark.model.spans import Span
from dspark.model.target import Target

TAPS = "the engine hands out the streams of the declared layers"
SAME = 0.05
"""Relative distance up to which two computations may be of one stream: 1e-6 in fp32, where
neighbouring layers of SmolLM2 lie 2.6e-2 to 0.6 apart. Which one it is, the nearest decides."""


@dataclass(frozen=True)
class Text:
    """Ids of a prompt and what was answered, from ``prompt_length``."""

    ids: list[int]
    prompt_length: int


class LiveEngine(Protocol):
    """``ours`` says that its states are computed by the very target that judges them."""

    ours: ClassVar[bool]

    def drafted(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[Generation]:
        """Every prompt answered with the draft, with a counter."""
        ...

    def observed(
        self, prompts: Sequence[list[int]], params: SamplingParams, texts: Sequence[Text]
    ) -> tuple[list[Generation], list[Example]]:
        """Every prompt answered without the draft, and the states of every text."""
        ...


@dataclass(frozen=True)
class OwnEngine:
    """Our decoders, with and without the draft, and the target whose states they come from."""

    target: Target
    decoder: LocalDecoder
    plain: LocalDecoder
    ours: ClassVar[bool] = True

    def drafted(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[Generation]:
        for prompt in prompts:
            yield self.decoder.generate(prompt, params)

    def observed(
        self, prompts: Sequence[list[int]], params: SamplingParams, texts: Sequence[Text]
    ) -> tuple[list[Generation], list[Example]]:
        answers = [self.plain.generate(prompt, params) for prompt in prompts]
        return answers, [example_of(self.target, t.ids, t.prompt_length) for t in texts]


@torch.inference_mode()
def example_of(target: Target, ids: list[int], prompt_length: int) -> Example:
    """One forward of the target over ``ids``: its taps, and both sides of its final norm."""
    tokens = torch.tensor(ids, device=target.device)
    with _norm_inputs(target.final_norm) as seen:
        out = target.forward(tokens.unsqueeze(0), Span.alone(1, len(ids), tokens.device), None)
    states = {i: out.taps[0, :, k] for k, i in enumerate(target.layer_ids)}
    states[EMBEDDING_LAYER] = target.embedding_weight()[tokens]
    return Example(tokens, prompt_length, states, out.final[0], seen[-1][0])


@contextmanager
def _norm_inputs(norm: nn.Module) -> Any:
    """Inputs of ``norm`` while the context is open, as a list of tensors [B, T, H]."""
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()


@torch.inference_mode()
def check_taps(target: Target, declared: Sequence[int], examples: Sequence[Example]) -> Check:
    """Of every declared layer, which of the target's streams the engine's is nearest to."""
    if not examples:
        return skipped("live.taps", TAPS, "no prompt to look at")
    own = [example_of(target, e.ids.tolist(), e.prompt_length) for e in examples]
    nearest: dict[int, int | None] = {}
    told = []
    for layer in declared:
        apart = {j: _distance(layer, j, examples, own) for j in own[0].states}
        others = min(d for j, d in apart.items() if j != layer)
        told.append(f"layer {layer}: {apart[layer]:.1e} apart, the nearest other {others:.1e}")
        best = min(apart.items(), key=lambda pair: pair[1])
        nearest[layer] = best[0] if best[1] <= SAME else None
    found = "; ".join(told)
    moved = {layer: j for layer, j in nearest.items() if j != layer}
    if not moved:
        return passed("live.taps", TAPS, found)
    names = {None: "no stream of the target", EMBEDDING_LAYER: "the embedding"}
    cause = "; ".join(
        f"for layer {layer} it hands out {names.get(j, f'that of layer {j}')}"
        for layer, j in moved.items()
    )
    return failed(
        "live.taps", TAPS, found, cause,
        "Neither capture nor serve with this engine: it counts layers otherwise, or runs another "
        "model.", "vllm-project/speculators #705, TorchSpec #87",
    )  # fmt: skip


def _distance(layer: int, other: int, theirs: Sequence[Example], own: Sequence[Example]) -> float:
    """Mean relative distance of the engine's stream ``layer`` and the target's ``other``."""
    apart = []
    for a, b in zip(theirs, own, strict=True):
        x, y = a.states[layer].float(), b.states[other].float()
        apart.append(float((x - y).norm() / y.norm().clamp_min(1e-6)))
    return sum(apart) / len(apart)
