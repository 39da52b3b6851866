"""Teacher-forced evaluation on answers that are never trained on.

Metrics of the contract (section 4): mean losses, ``accept_rate`` per slot, greedy agreement per
slot, ``tau = 1 + sum_k prod_{j<=k} c*_j`` on full blocks and on all, by category, and how far the
confidence head is off.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from dspark.training.anchors import Blocks
from dspark.training.loss import RowStats
from dspark.training.step import StepOutput


def block_tau(acceptance: Tensor, mask: Tensor) -> Tensor:
    """Expected acceptance length of each block: acceptance [N, K] (0 where masked) -> [N]."""
    return 1 + (acceptance * mask).cumprod(-1).sum(-1)


class Evaluator:
    """Accumulates batches; :meth:`summary` gives plain numbers for ``training.json``."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.taus: dict[str, list[Tensor]] = defaultdict(list)
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
            "confidence_bias": float(error.mean()),
            "confidence_abs_error": float(error.abs().mean()),
        }

    def _per_slot(self, slot: Tensor, value: Tensor) -> list[float]:
        means = []
        for k in range(self.block_size):
            chosen = value[slot == k]
            means.append(float(chosen.mean()) if len(chosen) else 0.0)
        return means
