"""One forward of the training layout: blocks in, loss terms and statistics out.

Everything a rank does with one micro-batch lives here; who averages what over which window is the
trainer's business. The head and the Markov output matrix may be restricted to a draft vocabulary
(:mod:`dspark.model.support`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark.model.draft import DraftLayer, DSparkDraft
from dspark.model.windows import Mask, Windows
from dspark.training.anchors import Blocks
from dspark.training.loss import LossInputs, RowStats, draft_loss, slot_weights

SHARDED_STEP = "sharded_step"


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


def weight_of(counts: Tensor, decay: float) -> float:
    """Sum of slot weights over blocks counted per slot, int64 [K]: the loss's denominator."""
    return float(counts.double() @ slot_weights(len(counts), decay).double())


def window_weight(batches: list[Blocks], decay: float) -> float:
    """:func:`weight_of` all slots of an accumulation window."""
    return sum(weight_of(blocks.slot_mask.sum((0, 1)), decay) for blocks in batches)


def layer_step(
    layer: DraftLayer,
    x: Tensor,
    rotation: Tensor,
    context: Tensor,
    context_rotation: Tensor,
    mask: Mask,
) -> Tensor:
    """One layer in the training layout: its own context rows [B, S, row], then its block rows.

    All that a layer's weights are needed for is in here, which is what sharding gathers and
    activation checkpointing computes again.
    """
    rows = layer.self_attn.rows(context, context_rotation)
    return layer.forward(x, rotation, rows, mask)


def run_layer(layer: DraftLayer, save_memory: bool, *args: Any) -> Tensor:
    """:func:`layer_step`; with ``save_memory`` its activations are made again going backward."""
    # A sharded layer brings its own, which gathers its weights first.
    step = getattr(layer, SHARDED_STEP, None)
    if step is not None:
        out: Tensor = step(save_memory, *args)
        return out
    return checked_layer_step(layer, save_memory, *args)


def checked_layer_step(layer: DraftLayer, save_memory: bool, *args: Any) -> Tensor:
    if save_memory and torch.is_grad_enabled():
        again: Tensor = checkpoint(layer_step, layer, *args, use_reentrant=False)
        return again
    return layer_step(layer, *args)


def block_states(draft: DSparkDraft, blocks: Blocks, *, save_memory: bool = False) -> Tensor:
    """Backbone states [B, A, K, H] of every block in the training layout."""
    anchor_ids = blocks.ids.gather(1, blocks.anchors)
    dtype = draft.context_norm.weight.dtype
    context = draft.context(blocks.taps.to(dtype))
    context_rotation = draft.rotation(blocks.context_positions)
    rotation = draft.rotation(blocks.positions)
    mask = blocks.attention
    device = blocks.anchors.device.type
    if isinstance(mask, Windows) and device != "cpu":
        mask = blocks.flexible() if device == "cuda" else mask.whole()
    x: Tensor = draft.embed_tokens(draft.block_ids(anchor_ids).flatten(1)).to(dtype)
    for layer in draft.draft_layers:
        x = run_layer(layer, save_memory, x, rotation, context, context_rotation, mask)
    flat: Tensor = draft.final_norm(x)
    return flat.view(*blocks.labels.shape, flat.shape[-1])


def _by_source(blocks: Blocks) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Indices (record, anchor, slot) of rows that count, those of one target position together;
    that position's number; and what brings such rows back into the mask's own order."""
    where = blocks.slot_mask.nonzero(as_tuple=True)
    position = where[0] * blocks.ids.shape[1] + blocks.source[where]
    order = torch.argsort(position, stable=True)
    batch, anchor, slot = (index[order] for index in where)
    return (batch, anchor, slot), position[order], torch.argsort(order)


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
    save_memory: bool = False,
) -> StepOutput:
    """Loss terms of one micro-batch; call under autocast for bf16 (the loss itself stays fp32)."""
    h = block_states(draft, blocks, save_memory=save_memory)
    m, e = draft.markov_head.block(blocks.previous, h)
    mask = blocks.slot_mask
    where, position, back = _by_source(blocks)
    h_rows, e_rows = h[where], e[where]
    if detach_confidence:
        confidence = draft.confidence_head(h_rows.detach(), e_rows.detach())
    else:
        confidence = draft.confidence_head(h_rows, e_rows)
    batch_rows, _, slots = where
    source = blocks.source[where]
    labels = blocks.labels[where]
    w2 = draft.markov_head.markov_w2.weight
    if vocabulary.support is not None and vocabulary.index is not None:
        w2, labels = w2[vocabulary.support], vocabulary.index[labels]
    dtype = vocabulary.head.dtype
    weights = slot_weights(mask.shape[-1], decay).to(mask.device)[slots]
    with torch.autocast(mask.device.type, enabled=False):
        terms, stats = draft_loss(
            LossInputs(
                h=h_rows.to(dtype),
                m=m[where].to(dtype),
                t=blocks.final[batch_rows, source].to(dtype),
                log_z=None if vocabulary.support is None else blocks.log_z[batch_rows, source],
                labels=labels,
                weight=weights,
                confidence=confidence,
                source=position,
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
    stats = RowStats(*(value[back] for value in vars(stats).values()))
    return StepOutput(terms, stats, confidence.detach().float()[back], slots[back])
