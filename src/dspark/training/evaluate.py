"""Teacher-forced evaluation on answers that are never trained on.

Metrics of the contract (section 4): mean losses, ``accept_rate`` per slot, greedy agreement per
slot, ``tau = 1 + sum_k prod_{j<=k} c*_j`` on full blocks and on all, by category and by length of
the context before the anchor, and how far the confidence head is off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.config.recipe import TrainSection
from dspark.hidden.record import HiddenRecord
from dspark.training.anchors import Blocks, build_blocks, sample_anchors
from dspark.training.batches import cut_rows
from dspark.training.loss import RowStats
from dspark.training.parallel import Solo, whole
from dspark.training.step import StepOutput, window_weight
from dspark.training.stepmodule import StepModule

BUCKETS = (
    ("below 1k", 0, 1024),
    ("1k to 4k", 1024, 4096),
    ("4k to 16k", 4096, 16_384),
    ("16k to 64k", 16_384, 65_536),
    ("from 64k", 65_536, 1 << 62),
)
"""Tokens before the anchor. Drafts that were useless beyond some length looked well on average."""


def block_tau(acceptance: Tensor, mask: Tensor) -> Tensor:
    """Expected acceptance length of each block: acceptance [N, K] (0 where masked) -> [N]."""
    return 1 + (acceptance * mask).cumprod(-1).sum(-1)


class Evaluator:
    """Accumulates batches; :meth:`summary` gives plain numbers for ``training.json``."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.taus: dict[str, list[Tensor]] = defaultdict(list)
        self.contexts: dict[str, list[Tensor]] = defaultdict(list)
        self.full: list[Tensor] = []

    def add(self, blocks: Blocks, out: StepOutput, categories: list[str]) -> None:
        """One batch; ``categories`` has one name per record."""
        stats: RowStats = out.stats
        for name, value in (
            ("ce", stats.ce),
            ("inside", stats.inside),
            ("l1", stats.l1),
            ("agree", stats.agree),
            ("acceptance", stats.acceptance),
            ("confidence", torch.sigmoid(out.confidence)),
            ("slot", out.slots),
        ):
            self.rows[name].append(value.detach().float().cpu())
        mask = blocks.slot_mask.cpu()
        grid = torch.zeros(mask.shape)
        grid[mask] = stats.acceptance.detach().float().cpu()
        tau = block_tau(grid, mask)
        some = mask.any(-1)
        for row, category in enumerate(categories):
            self.taus[category].append(tau[row][some[row]])
        self.full.append(tau[mask.all(-1)])
        at = (blocks.anchors - blocks.first).cpu()
        for name, low, high in BUCKETS:
            chosen = tau[some & (at >= low) & (at < high)]
            if len(chosen):
                self.contexts[name].append(chosen)

    def summary(self) -> dict[str, Any]:
        """Keys as in the report's ``Evaluation`` (without step and seconds)."""
        rows = {name: torch.cat(values) for name, values in self.rows.items()}
        every = torch.cat([t for values in self.taus.values() for t in values])
        full = torch.cat(self.full)
        error = rows["confidence"] - rows["acceptance"]
        target, p = (
            rows["acceptance"].clamp(1e-6, 1 - 1e-6),
            rows["confidence"].clamp(1e-6, 1 - 1e-6),
        )
        bce = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
        return {
            # Over labels the draft can propose; 0.0 where there is none.
            "ce": float(rows["ce"].sum() / rows["inside"].sum().clamp_min(1)),
            "outside": 1 - float(rows["inside"].mean()),
            "l1": float(rows["l1"].mean()),
            "confidence": float(bce),
            "accept_rate": self._per_slot(rows["slot"], rows["acceptance"]),
            "greedy_agreement": self._per_slot(rows["slot"], rows["agree"]),
            "tau_all": float(every.mean()),
            "tau_full": float(full.mean()) if len(full) else float(every.mean()),
            "by_category": {c: float(torch.cat(v).mean()) for c, v in sorted(self.taus.items())},
            "by_context": {
                name: float(torch.cat(self.contexts[name]).mean())
                for name, _, _ in BUCKETS
                if name in self.contexts
            },
            "confidence_bias": float(error.mean()),
            "confidence_abs_error": float(error.abs().mean()),
        }

    def _per_slot(self, slot: Tensor, value: Tensor) -> list[float]:
        means = []
        for k in range(self.block_size):
            chosen = value[slot == k]
            means.append(float(chosen.mean()) if len(chosen) else 0.0)
        return means


@dataclass(frozen=True)
class Held:
    """Held-back rows; their anchors are the same at every evaluation."""

    records: Sequence[HiddenRecord]
    section: TrainSection
    block_size: int
    device: torch.device

    def batches(self) -> Iterator[tuple[Blocks, list[str]]]:
        """Batches with a counted slot, and the categories of their rows."""
        generator = torch.Generator().manual_seed(self.section.seed)
        for part in cut_rows([len(r) for r in self.records], self.section):
            records = list(self.records[part])
            anchors = [
                sample_anchors(r.loss_mask, self.section.num_anchors, generator) for r in records
            ]
            blocks = build_blocks(records, anchors, self.block_size)
            if bool(blocks.slot_mask.any()):
                yield blocks.to(self.device), [r.category for r in records]


def evaluate_held(module: StepModule, held: Held, group: Solo) -> dict[str, Any]:
    """Metrics on the held rows and the gradient-norm shares. Every rank computes the same."""
    loss = held.section.loss
    coefs = (loss.ce, loss.l1, loss.confidence)
    evaluator, first = Evaluator(held.block_size), None
    with torch.no_grad():
        for blocks, categories in held.batches():
            first = first or blocks
            evaluator.add(blocks, module.run(blocks, coefs, 1.0), categories)
    assert first is not None
    return {**evaluator.summary(), "grad_share": gradient_share(module, first, coefs, group)}


def gradient_share(
    module: StepModule, blocks: Blocks, coefs: tuple[float, float, float], group: Solo
) -> dict[str, float]:
    """Norm of each weighted term's gradient on one batch, as shares of their sum."""
    denominator = window_weight([blocks], module.section.loss.decay)
    parameters = [p for p in module.draft.parameters() if p.requires_grad]
    group.last_micro_batch(module, True)
    norms = {}
    for i, name in enumerate(("ce", "l1", "confidence")):
        single = tuple(c if i == j else 0.0 for j, c in enumerate(coefs))
        out = module.run(blocks, (single[0], single[1], single[2]), denominator)
        # Both are differentiated, because shards are reduced together; the other one is zero.
        torch.stack(list(out.terms.values())).sum().backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        norms[name] = math.sqrt(sum(float(whole(g.float().square().sum())) for g in grads))
        for parameter in parameters:
            parameter.grad = None
    total = sum(norms.values()) or 1.0
    return {name: value / total for name, value in norms.items()}
