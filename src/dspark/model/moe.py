"""A mixture of experts as DeepSeek-V3 and Kimi-K2 have it (DeepSeek-V3 report, section 2.1.2),
and Kimi-K3's variant, whose routed experts work in a narrower latent space (LatentMoE).

Each token goes to ``top_k`` of the routed experts, chosen by sigmoid scores plus a learned
correction that balances the load; the correction decides who is chosen and not with what weight.
Experts are chosen within the best groups only. Shared experts see every token.

Experts are plain modules, run one after the other on the tokens they were given: on CPU each is
prepacked like any other linear, and a token's sum over experts always has the same order, whatever
else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config.hybrid import SituConfig
from dspark.config.target import ExpertConfig
from dspark.model.layers import FusedMLP, RMSNorm


class Router(nn.Module):
    """Which experts each token goes to. Always float32: near ties would flip in bfloat16."""

    correction: Tensor

    def __init__(self, hidden: int, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, hidden))
        self.register_buffer("correction", torch.zeros(config.n_routed_experts))

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Follow a move, not a cast: rounded scores would choose other experts."""
        weight, correction = self.weight.data, self.correction
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not correction.is_meta:
            self.weight.data = weight.to(self.weight.device)
            self.correction = correction.to(self.correction.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> weights [N, k] float32 and experts [N, k] int64."""
        c = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        ranked = scores + self.correction.float()
        groups = ranked.unflatten(-1, (c.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1, sorted=False).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
        ranked = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = ranked.topk(c.num_experts_per_tok, -1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling_factor, chosen


class ExpertsMLP(nn.Module):
    """Routed experts plus the shared ones."""

    def __init__(
        self, hidden: int, config: ExpertConfig, eps: float, situ: SituConfig | None = None
    ) -> None:
        super().__init__()
        size, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        self.gate = Router(hidden, config)
        self.experts = nn.ModuleList(
            FusedMLP(latent or hidden, size, situ) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = FusedMLP(hidden, size * config.n_shared_experts, situ)
        self.latent = latent is not None
        if latent is not None:
            self.routed_down_proj = nn.Linear(hidden, latent, bias=False)
            normed = config.latent_moe_use_norm
            self.routed_norm = RMSNorm(latent, eps) if normed else nn.Identity()
            self.routed_up_proj = nn.Linear(latent, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H] of the same dtype."""
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat)
        if self.latent:
            flat = self.routed_down_proj(flat)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            token, place = (chosen == number).nonzero(as_tuple=True)
            part = self.experts[number](flat[token]) * weights[token, place, None]
            # A token meets an expert once at most, so nothing is added twice in one call.
            out[token] += part.to(out.dtype)
        if self.latent:
            out = self.routed_up_proj(self.routed_norm(out))
        shared: Tensor = self.shared_experts(x)
        return out.view_as(x) + shared
