"""Grouped-query attention: of ordinary targets (Llama, Qwen, SmolLM) and of the qwen3 draft.

A target's query, key and value come out of one matrix product, and queries and keys are rotated in
one complex multiplication. Checkpoints keep them apart; ``dspark.model.weights`` joins them.

The draft's attention is Qwen3's with two changes (DeepSpec, ``modeling/dspark/qwen3``): it is not
causal, and keys and values of the context are made from the context vectors of
:class:`~dspark.model.draft.DSparkDraft`, not from the layer's own input. ``k_norm`` and rotation
treat both alike, so a cached row is simply ``[keys | values]`` of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config.architecture import Qwen3DraftConfig
from dspark.config.target import TargetConfig
from dspark.model.layers import RMSNorm, Rope, rotate, rotate_halves
from dspark.model.spans import Span
from dspark.model.states import Rows
from dspark.model.windows import Mask, attend

SHORT = 16  # queries up to which the grouped product beats SDPA on CPU, for several requests


def attend_few(q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, heads, T, d] over key/value [B, kv_heads, N, d] -> [B, heads, T, d], for few queries.

    Two products grouped by key head read every key once. SDPA's CPU kernel pads query blocks and
    measured 5x slower (batch 64, one query, 181 keys); a lone request's it runs faster (20 against
    30 us for one query, 64 against 78 for eight, over 256 keys). ``mask`` is boolean, [T, N] or
    [B, 1, T, N], True = may attend; every query must see a key.
    """
    heads, kv_heads, length = q.shape[1], key.shape[1], q.shape[2]
    group = heads // kv_heads
    grouped = torch.unflatten(q, 1, (kv_heads, group)).flatten(2, 3)
    grouped = grouped * q.shape[-1] ** -0.5
    scores = torch.matmul(grouped, key.transpose(-1, -2))
    if mask is not None:
        scores = torch.unflatten(scores, 2, (group, length))
        allowed = mask if mask.dim() == 2 else mask.unsqueeze(1)
        scores = scores.masked_fill(~allowed, float("-inf")).flatten(2, 3)
    mixed = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
    return torch.unflatten(mixed, 2, (group, length)).flatten(1, 2)


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

    def forward(self, x: Tensor, rotation: Tensor, span: Span, cache: Rows | None) -> Tensor:
        """x [B, T, hidden], rotation [B, T, head_dim/2] -> [B, T, hidden]."""
        rotated = self.heads + self.kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (rotated + self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = rotate(self.q_norm(qkv[..., : self.heads, :]), rotation)
            k = rotate(self.k_norm(qkv[..., self.heads : rotated, :]), rotation)
        else:
            qk = rotate(qkv[..., :rotated, :], rotation)
            q, k = torch.split(qk, [self.heads, self.kv_heads], -2)
        value = qkv[..., rotated:, :]
        rows: Sequence[Sequence[Tensor]] = [(k.transpose(1, 2), value.transpose(1, 2))]
        if cache is not None:
            rows = cache.append(self.layer, span, k, value)
        mixed: Tensor = self.o_proj(span.over(self._attend, (q,), rows).flatten(-2))
        return mixed

    def _attend(
        self, queries: Sequence[Tensor], rows: Sequence[Tensor], mask: Tensor | None, causal: bool
    ) -> Tensor:
        """q [B, T, heads, d] over key, value [B, kv_heads, N, d] -> [B, T, heads, d]."""
        q, (key, value) = queries[0].transpose(1, 2), rows
        if len(q) == 1 or q.shape[2] > SHORT or causal:
            out = F.scaled_dot_product_attention(
                q, key, value, attn_mask=mask, is_causal=causal,
                enable_gqa=self.heads != self.kv_heads,
            )  # fmt: skip
        else:
            out = attend_few(q, key, value, mask)
        return out.transpose(1, 2)


class GroupedBlockAttention(nn.Module):
    """Attention of one qwen3 draft layer; names and rotary layout as published."""

    def __init__(self, config: Qwen3DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, width = config.hidden_size, self.kv_heads * self.head_dim
        self.rope = Rope(self.head_dim, config.rope_parameters)
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def rows(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rows of x [B, T, hidden] at ``rotation`` [B, T, head_dim/2] -> [B, T, row]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        return torch.cat([rotate_halves(key, rotation).flatten(-2), self.v_proj(x)], -1)

    def queries(self, x: Tensor, rotation: Tensor) -> tuple[Tensor]:
        """The one part of the queries of x: [B, heads, T, d]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return (rotate_halves(q, rotation).transpose(1, 2),)

    def _keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[B, kv_heads, N, d] each, of ``rows`` [B, N, row]."""
        split = torch.unflatten(rows, -1, (2, self.kv_heads, self.head_dim))
        key, value = split.transpose(1, 3).unbind(2)
        return key, value

    def project(self, out: Tensor) -> Tensor:
        """What attention gives [B, heads, T, d] -> [B, T, hidden]."""
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return mixed

    def forward(self, x: Tensor, rotation: Tensor, rows: Tensor, mask: Mask | None) -> Tensor:
        """x [B, T, hidden] over ``rows`` [B, N, row] -> [B, T, hidden].

        ``mask`` is boolean, broadcastable to [B, 1, T, N], True = may attend, or windows of it. A
        query that may attend to nothing gives zeros (never NaN).
        """
        (q,), (key, value) = self.queries(x, rotation), self._keys_values(rows)
        enable_gqa = self.heads != self.kv_heads
        return self.project(attend(q, key, value, mask, enable_gqa=enable_gqa))

    def prepare_serving(self) -> None:
        """Nothing: :meth:`attend_few` reads rows only, no weights."""

    def attend_few(self, queries: Sequence[Tensor], rows: Tensor, mask: Tensor | None) -> Tensor:
        """Queries as :meth:`queries` gives them over ``rows`` [B, N, row] -> [B, heads, T, d], as
        in :meth:`forward` but for one block over a long context. Inference only."""
        return attend_few(queries[0], *self._keys_values(rows), mask)
