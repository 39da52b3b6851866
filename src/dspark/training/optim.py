"""Optimiser, schedules and averages, on fp32 master weights.

AdamW, or Muon for the layers' matrices with AdamW for the rest (norms, embeddings of the Markov
head, the confidence head). The rate warms up linearly and then falls: by a cosine or a line to
zero, or not at all until the last ``decay_ratio`` of the run (``wsd``), which lets a run be
prolonged from before its decay.

``ce_first`` starts the loss on cross entropy: while q and p hardly overlap, L1 has little gradient.
Over that first fraction of the run the coefficients move linearly to the recipe's (paper's) values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config.recipe import LossSection, TrainSection


class Optimizers(torch.optim.Optimizer):
    """Several optimisers as one: groups, steps and state together."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(i)])


def _adamw(parameters: list[nn.Parameter], section: TrainSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=section.weight_decay,
        fused=True,
    )


def build_optimizer(module: nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """Over the trainable parameters; the frozen embedding never enters."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if section.optimizer == "adamw":
        return _adamw(list(trained.values()), section)
    matrices = [p for n, p in trained.items() if p.ndim == 2 and "layers." in n]
    chosen = {id(p) for p in matrices}
    muon = torch.optim.Muon(
        matrices,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimizers([muon, _adamw([p for p in trained.values() if id(p) not in chosen], section)])


def learning_rate(section: TrainSection, step: float, total: int) -> float:
    """Rate of optimiser step ``step`` (from 0) of ``total``: warm-up, then down to 0.

    ``step`` is a place in the schedule; in a run limited by time it lies between whole steps.
    """
    warmup = max(1, round(section.warmup_ratio * total))
    if step < warmup:
        return section.learning_rate * min(1.0, (step + 1) / warmup)
    progress = min((step - warmup) / max(1, total - warmup), 1.0)
    if section.schedule == "linear":
        return section.learning_rate * (1 - progress)
    if section.schedule == "wsd":
        return section.learning_rate * min(1.0, (1 - progress) / section.decay_ratio)
    return section.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def coefficients(loss: LossSection, step: float, total: int) -> tuple[float, float, float]:
    """(ce, l1, confidence) at ``step``: from (1, 0, c) to the recipe's over ``ce_first``."""
    if loss.ce_first == 0:
        return loss.ce, loss.l1, loss.confidence
    mix = min(1.0, step / max(1.0, loss.ce_first * total))
    return (1 - mix) + mix * loss.ce, mix * loss.l1, loss.confidence


class Average:
    """Exponential moving average of the trained weights, kept in fp32 beside them."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = module
        self.values = {
            n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """After every optimiser step."""
        for name, parameter in self._trained().items():
            self.values[name].lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange average and weights; twice changes nothing."""
        for name, parameter in self._trained().items():
            kept = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(kept)

    def _trained(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}
