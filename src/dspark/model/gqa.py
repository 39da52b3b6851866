"""Grouped-query attention with fused projections, for ordinary targets (Llama, Qwen, SmolLM).

Query, key and value come out of one matrix product, and queries and keys are rotated in one
complex multiplication. Checkpoints keep them apart; ``dspark.model.weights`` joins them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config.target import TargetConfig
from dspark.model.cache import RowCache, Span
from dspark.model.layers import RMSNorm, rotate

SHORT = 16  # queries up to which the grouped product beats SDPA on CPU


class GroupedAttention(nn.Module):
    """Causal attention of one target layer; keys and values live in the row cache."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=bias)
        # Qwen2 has biases on q, k, v but none on the output projection.
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Tensor, span: Span, cache: RowCache | None) -> Tensor:
        """x [B, T, hidden], rotation [B, T, head_dim/2] -> [B, T, hidden]."""
        rotated = self.heads + self.kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (rotated + self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = rotate(self.q_norm(qkv[..., : self.heads, :]), rotation)
            k = rotate(self.k_norm(qkv[..., self.heads : rotated, :]), rotation)
        else:
            qk = rotate(qkv[..., :rotated, :], rotation)
            q, k = torch.split(qk, [self.heads, self.kv_heads], -2)
        key, value = k.transpose(1, 2), qkv[..., rotated:, :].transpose(1, 2)
        if cache is not None:
            key, value = cache.append(self.layer, span, key, value)
        out = self._attend(q.transpose(1, 2), key, value, span)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return mixed

    def _attend(self, q: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        """q [B, heads, T, d] over key/value [B, kv_heads, N, d] -> [B, heads, T, d]."""
        length = q.shape[2]
        if length > SHORT or span.causal:
            return F.scaled_dot_product_attention(
                q,
                key,
                value,
                attn_mask=span.mask,
                is_causal=span.causal,
                enable_gqa=self.heads != self.kv_heads,
            )
        # Few queries: two products grouped by key head read every key once. SDPA's CPU kernel
        # pads query blocks and measured 5x slower here (batch 64, one query, 181 keys).
        group = self.heads // self.kv_heads
        grouped = torch.unflatten(q, 1, (self.kv_heads, group)).flatten(2, 3)
        grouped = grouped * self.head_dim**-0.5
        scores = torch.matmul(grouped, key.transpose(-1, -2))
        if span.mask is not None:
            scores = torch.unflatten(scores, 2, (group, length))
            allowed = span.mask if span.mask.dim() == 2 else span.mask.unsqueeze(1)
            scores = scores.masked_fill(~allowed, float("-inf")).flatten(2, 3)
        mixed = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
        return torch.unflatten(mixed, 2, (group, length)).flatten(1, 2)
