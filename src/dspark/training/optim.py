"""Optimiser and schedule: AdamW on fp32 master weights, linear warm-up, cosine to zero.

``ce_first`` starts the loss on cross entropy: while q and p hardly overlap, L1 has little gradient.
Over that first fraction of the run the coefficients move linearly to the recipe's (paper's) values.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dspark.config.recipe import LossSection, TrainSection


def build_optimizer(module: nn.Module, section: TrainSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; the frozen embedding never enters."""
    return torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad],
        lr=section.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=section.weight_decay,
        fused=True,
    )


def learning_rate(section: TrainSection, step: float, total: int) -> float:
    """Rate of optimiser step ``step`` (from 0) of ``total``: warm-up, then cosine to 0.

    ``step`` is a place in the schedule; in a run limited by time it lies between whole steps.
    """
    warmup = max(1, round(section.warmup_ratio * total))
    if step < warmup:
        return section.learning_rate * min(1.0, (step + 1) / warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return section.learning_rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def coefficients(loss: LossSection, step: float, total: int) -> tuple[float, float, float]:
    """(ce, l1, confidence) at ``step``: from (1, 0, c) to the recipe's over ``ce_first``."""
    if loss.ce_first == 0:
        return loss.ce, loss.l1, loss.confidence
    mix = min(1.0, step / max(1.0, loss.ce_first * total))
    return (1 - mix) + mix * loss.ce, mix * loss.l1, loss.confidence
