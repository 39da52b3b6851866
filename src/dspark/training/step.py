"""One forward of the training layout: blocks in, loss terms and statistics out.

Everything a rank does with one micro-batch lives here; who averages what over which window is the
trainer's business. The head and the Markov output matrix may be restricted to a draft vocabulary
(:mod:`dspark.model.support`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.model.draft import DSparkDraft
from dspark.training.anchors import Blocks
from dspark.training.loss import LossInputs, RowStats, draft_loss, slot_weights


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the target's lm_head that the draft may propose.

    ``head`` [V', H] in the loss's dtype; ``support`` [V'] ids or None for all; ``index`` [V] maps
    ids to rows, -1 outside.
    """

    head: Tensor
    support: Tensor | None
    index: Tensor | None

    @staticmethod
    def of(head: Tensor, support: Tensor | None, dtype: torch.dtype) -> Vocabulary:
        if support is None:
            return Vocabulary(head.to(dtype), None, None)
        index = torch.full((head.shape[0],), -1, dtype=torch.long, device=head.device)
        index[support] = torch.arange(len(support), device=head.device)
        return Vocabulary(head[support].to(dtype), support, index)


@dataclass(frozen=True)
class StepOutput:
    """``terms`` sum to the loss; ``stats``, ``confidence`` and ``slots`` describe rows [R]."""

    terms: dict[str, Tensor]
    stats: RowStats
    confidence: Tensor
    slots: Tensor


def window_weight(batches: list[Blocks], decay: float) -> float:
    """Sum of slot weights over an accumulation window: the loss's denominator."""
    total = 0.0
    for blocks in batches:
        per_slot = blocks.slot_mask.sum((0, 1)).double()
        total += float(per_slot @ slot_weights(len(per_slot), decay).double())
    return total


def block_states(draft: DSparkDraft, blocks: Blocks) -> Tensor:
    """Backbone states [B, A, K, H] of every block in the training layout."""
    batch, size = blocks.ids.shape
    anchor_ids = blocks.ids.gather(1, blocks.anchors)
    positions = torch.arange(size, device=blocks.ids.device).expand(batch, -1)
    context = draft.context(blocks.taps.to(draft.context_norm.weight.dtype))
    rows = draft.context_rows(context, positions)
    flat = draft.backbone(
        draft.block_ids(anchor_ids).flatten(1), blocks.positions, rows, blocks.attention
    )
    return flat.view(*blocks.labels.shape, flat.shape[-1])


def training_step(
    draft: DSparkDraft,
    blocks: Blocks,
    vocabulary: Vocabulary,
    *,
    coefficients: tuple[float, float, float],
    decay: float,
    denominator: Tensor | float,
    chunk: int,
    detach_confidence: bool = False,
) -> StepOutput:
    """Loss terms of one micro-batch; call under autocast for bf16 (the loss itself stays fp32)."""
    h = block_states(draft, blocks)
    m, e = draft.markov_head.block(blocks.previous, h)
    mask = blocks.slot_mask
    h_rows, e_rows = h[mask], e[mask]
    if detach_confidence:
        confidence = draft.confidence_head(h_rows.detach(), e_rows.detach())
    else:
        confidence = draft.confidence_head(h_rows, e_rows)
    batch_rows = torch.arange(len(mask), device=mask.device).view(-1, 1, 1).expand_as(mask)[mask]
    source = blocks.source[mask]
    labels = blocks.labels[mask]
    w2 = draft.markov_head.markov_w2.weight
    if vocabulary.support is not None and vocabulary.index is not None:
        w2, labels = w2[vocabulary.support], vocabulary.index[labels]
    dtype = vocabulary.head.dtype
    weights = slot_weights(mask.shape[-1], decay).to(mask.device).expand(mask.shape)[mask]
    with torch.autocast(mask.device.type, enabled=False):
        terms, stats = draft_loss(
            LossInputs(
                h=h_rows.to(dtype),
                m=m[mask].to(dtype),
                t=blocks.final[batch_rows, source].to(dtype),
                log_z=None if vocabulary.support is None else blocks.log_z[batch_rows, source],
                labels=labels,
                weight=weights,
                confidence=confidence,
            ),
            vocabulary.head,
            w2.to(dtype),
            coefficients=coefficients,
            denominator=denominator,
            chunk=chunk,
        )
    if vocabulary.index is not None:
        # The loss only sees the support; where the target's own choice lies outside, q is wrong.
        choice = blocks.greedy[batch_rows, source]
        reachable = (choice >= 0) & (vocabulary.index[choice.clamp_min(0)] >= 0)
        stats = replace(stats, agree=stats.agree * reachable)
    slots = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)[mask]
    return StepOutput(terms, stats, confidence.detach().float(), slots)
