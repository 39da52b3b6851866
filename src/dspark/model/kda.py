"""Kimi Delta Attention: one recurrent layer of a hybrid target (arXiv 2510.26692).

Queries, keys and values pass a short causal convolution; keys and queries are normalised per head;
a forget gate decays every channel of the state on its own. The rule itself is
``dspark.model.delta``, the states are ``dspark.model.states``. The semantics are those of
transformers' ``KimiLinearDeltaAttention``, with which the tests compare.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config.target import TargetConfig
from dspark.model.delta import l2_normalised, solve
from dspark.model.spans import Span
from dspark.model.states import HybridCache, short_convolution


class ForgetGate(nn.Module):
    """Log decays per channel; the two vectors stay float32 whatever the model is cast to."""

    def __init__(self, heads: int, head_dim: int, lower_bound: float | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.lower_bound = heads, head_dim, lower_bound
        self.rate = nn.Parameter(torch.zeros(heads))
        self.offset = nn.Parameter(torch.zeros(heads * head_dim))

    def _apply(self, fn: Any, recurse: bool = True) -> ForgetGate:
        """Follow a move, not a cast."""
        kept = self.rate.data, self.offset.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not kept[0].is_meta:
            self.rate.data = kept[0].to(self.rate.device)
            self.offset.data = kept[1].to(self.offset.device)
        return self

    def forward(self, raw: Tensor) -> Tensor:
        """raw [..., H * d] -> log decays [..., H, d] float32, at most 0."""
        open_ = (raw.float() + self.offset).unflatten(-1, (self.heads, self.head_dim))
        rate = self.rate.exp().unsqueeze(-1)
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate * open_)
        return -rate * F.softplus(open_)


class DeltaAttention(nn.Module):
    """``layer`` counts recurrent layers only, as their states do."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        linear = config.linear
        assert linear is not None
        self.layer, self.heads, self.head_dim = layer, linear.heads, linear.head_dim
        hidden, width = config.hidden_size, linear.width
        self.qkv_proj = nn.Linear(hidden, 3 * width, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * width, linear.kernel))
        # Forget gate (of low rank), output gate (of low rank, or whole), strength read one input.
        low, whole = linear.head_dim, linear.full_rank_gate
        self.gate_sizes = [low, width if whole else low, linear.heads]
        self.gates_proj = nn.Linear(hidden, sum(self.gate_sizes), bias=False)
        self.f_b_proj = nn.Linear(low, width, bias=False)
        self.g_b_proj = nn.Identity() if whole else nn.Linear(low, width, bias=False)
        self.forget = ForgetGate(linear.heads, linear.head_dim, linear.lower_bound)
        self.o_norm = nn.Parameter(torch.ones(linear.head_dim))
        self.eps = config.rms_norm_eps
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(
        self, x: Tensor, _rotation: Tensor | None, span: Span, cache: HybridCache
    ) -> Tensor:
        """x [B, T, hidden] (or flat [1, total, hidden]) -> the same shape."""
        states, layout = cache.states, cache.states.layout
        matrices, past = states.load(self.layer)
        inputs = layout.behind(past, self.qkv_proj(x))
        mixed = short_convolution(inputs, self.conv.to(inputs.dtype)).float()
        query, key, value = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        forget, gate, strength = self.gates_proj(x).split(self.gate_sizes, -1)
        decay = layout.quiet(layout.spread(self.forget(self.f_b_proj(forget))))
        strength = layout.quiet(layout.spread(strength.sigmoid().float()))
        out, start, updates = solve(
            (l2_normalised(query) * self.head_dim**-0.5).transpose(1, 2),
            l2_normalised(key).transpose(1, 2),
            value.transpose(1, 2),
            decay.transpose(1, 2),
            strength.transpose(1, 2),
            matrices,
        )
        states.keep(self.layer, start, updates, inputs)
        heads = layout.flatten(out.transpose(1, 2)).to(x.dtype)
        mixed_out: Tensor = self.o_proj(self._gated(heads, self.g_b_proj(gate)))
        return mixed_out

    def _gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """RMS norm per head in float32, times the sigmoid of the gate -> [..., H * d]."""
        wide = F.rms_norm(heads.float(), (self.head_dim,), self.o_norm.float(), self.eps)
        return (wide.flatten(-2) * gate.float().sigmoid()).to(heads.dtype)
