"""What quantizing costs, measured on states of a real target: per module, and in the logits.

Both drafts see the same blocks: context rows from the same taps, the same anchors, the true
previous tokens for the Markov head. A module's error is its FP8 output against its float output on
the float draft's own inputs, so that errors of earlier modules do not count twice. KL, cosine and
agreement are of whole drafts and hold everything together. What it means for decoding is said by
acceptance alone (``benchmarks/fp8.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.model.draft import DSparkDraft


@dataclass(frozen=True)
class Sample:
    """One sequence: ids [S], taps [S, L, H], and anchors with a whole block behind them."""

    ids: Tensor
    taps: Tensor
    anchors: Sequence[int]


@dataclass(frozen=True)
class Comparison:
    """``modules``: name -> norm of the error over norm of the output.

    The rest is averaged over slots: KL of the quantized draft's distribution from the float one's
    (nats), cosine of logits, share of the same argmax, absolute difference of confidences.
    """

    modules: dict[str, float]
    kl: float
    cosine: float
    agreement: float
    confidence_difference: float
    slots: int


@torch.inference_mode()
def compare(
    plain: DSparkDraft, quantized: DSparkDraft, head: Tensor, samples: Iterable[Sample]
) -> Comparison:
    """Run both drafts over ``samples``; ``head`` [V, H] is the target's.

    ``quantized`` may hold FP8 linears or the dequantized values of a checkpoint.
    """
    errors: dict[str, list[float]] = {}
    rows: list[Tensor] = []
    with ExitStack() as stack:
        for name, module in plain.named_modules():
            twin = dict(quantized.named_modules())[name]
            if isinstance(module, nn.Linear) and not _same(module, twin):
                errors[name] = [0.0, 0.0]
                hook = module.register_forward_hook(_measure(twin, errors[name]))
                stack.callback(hook.remove)
        for sample in samples:
            for anchor in sample.anchors:
                first, sure = _block(plain, head, sample, anchor)
                second, other = _block(quantized, head, sample, anchor)
                rows.append(_figures(first, second, (sure - other).abs()))
    kl, cosine, agreement, confidence = torch.cat(rows).mean(0).tolist()
    slots = sum(len(part) for part in rows)
    ratios = {name: (error / total) ** 0.5 for name, (error, total) in errors.items()}
    return Comparison(ratios, kl, cosine, agreement, confidence, slots)


def _same(module: nn.Linear, twin: Any) -> bool:
    return isinstance(twin, nn.Linear) and twin.weight.equal(module.weight)


def _measure(twin: Any, sums: list[float]) -> Callable[..., None]:
    """A hook that adds the squared error of ``twin`` on the same input, and the squared output."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sums[0] += float((twin(inputs[0]) - output).double().square().sum())
        sums[1] += float(output.double().square().sum())

    return hook


def _block(draft: DSparkDraft, head: Tensor, sample: Sample, anchor: int) -> tuple[Tensor, Tensor]:
    """Logits [K, V] and confidences [K] of the block at ``anchor``."""
    width, dtype = draft.config.block_size, draft.context_norm.weight.dtype
    taps = sample.taps[:anchor].unsqueeze(0).to(dtype)
    context = draft.context_rows(draft.context(taps), torch.arange(anchor).unsqueeze(0))
    positions = torch.arange(anchor, anchor + width).unsqueeze(0)
    ids = draft.block_ids(sample.ids[anchor : anchor + 1].long())
    hidden = draft.backbone(ids, positions, context, None)
    previous = sample.ids[anchor : anchor + width].long().unsqueeze(0)
    features, embedded = draft.markov_head.block(previous, hidden)
    logits = hidden @ head.to(dtype).T + draft.markov_head.markov_w2(features)
    confidence = torch.sigmoid(draft.confidence_head(hidden, embedded))
    return logits[0].float(), confidence[0].float()


def _figures(first: Tensor, second: Tensor, sure: Tensor) -> Tensor:
    """[K, 4]: KL, cosine, agreement, difference of confidences."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    kl = (p.exp() * (p - q)).nan_to_num(0.0).sum(-1)
    cosine = torch.cosine_similarity(first, second, dim=-1)
    agree = (first.argmax(-1) == second.argmax(-1)).float()
    return torch.stack([kl, cosine, agree, sure], -1)
