"""Multi-head latent attention (DeepSeek-V2), used by the draft AND by MLA targets.

What is cached per layer and token is one latent row ``[kv_lora_rank | rope part]``, already
normalised and rotated: 512 + 64 = 576 elements for Kimi-K3, the same for target and draft, which
is why the draft's layers are just more layers of the target's cache.

Two forms of the same attention. *Plain*: rows are expanded to per-head keys and values, cheapest
when there are many queries (training, prefill). *Absorbed*: the key expansion moves into the query
and the value expansion behind the softmax, so rows are read as they lie (a block of 7 queries over
a long context). Their equality is a permanent test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.config.architecture import RopeParameters
from dspark.model.fp8 import plain_weight
from dspark.model.layers import RMSNorm, Rope, rotate
from dspark.model.windows import Mask, attend


@dataclass(frozen=True)
class LatentDims:
    """Sizes of one latent attention; ``q_lora`` None means a full-rank query projection."""

    hidden: int
    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    eps: float

    @property
    def row(self) -> int:
        return self.kv_lora + self.rope


class LatentAttention(nn.Module):
    """Names follow DeepSeek-V3 checkpoints: q_a_proj ... kv_b_proj, o_proj."""

    def __init__(self, dims: LatentDims, rope: RopeParameters, *, bias: bool = False) -> None:
        super().__init__()
        d = self.dims = dims
        self.rope = Rope(d.rope, rope)
        self.scale = (d.nope + d.rope) ** -0.5 * self.rope.softmax_factor
        query_width = d.heads * (d.nope + d.rope)
        if d.q_lora is None:
            self.q_proj = nn.Linear(d.hidden, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(d.hidden, d.q_lora, bias=bias)
            self.q_a_layernorm = RMSNorm(d.q_lora, d.eps)
            self.q_b_proj = nn.Linear(d.q_lora, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d.hidden, d.row, bias=bias)
        self.kv_a_layernorm = RMSNorm(d.kv_lora, d.eps)
        self.kv_b_proj = nn.Linear(d.kv_lora, d.heads * (d.nope + d.v), bias=False)
        self.o_proj = nn.Linear(d.heads * d.v, d.hidden, bias=bias)
        self._expansion: Tensor | None = None

    def rows(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Latent rows of x [B, T, hidden] at ``rotation`` [B, T, rope/2] -> [B, T, row].

        Without a rotation (NoPE) the rope part is shared by all heads as it is.
        """
        latent, roped = self.kv_a_proj_with_mqa(x).split([self.dims.kv_lora, self.dims.rope], -1)
        if rotation is not None:
            roped = rotate(roped.unsqueeze(-2), rotation).squeeze(-2)
        return torch.cat([self.kv_a_layernorm(latent), roped], dim=-1)

    def queries(self, x: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor]:
        """Parts of the queries: nope [B, T, heads, nope] and rotated rope [B, T, heads, rope]."""
        d = self.dims
        if d.q_lora is None:
            flat = self.q_proj(x)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = flat.unflatten(-1, (d.heads, d.nope + d.rope))
        nope, roped = q.split([d.nope, d.rope], -1)
        return nope, roped if rotation is None else rotate(roped, rotation)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        rows: Tensor,
        mask: Mask | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Plain attention of x [B, T, hidden] over latent ``rows`` [B, N, row].

        ``mask`` is boolean, broadcastable to [B, 1, T, N], True = may attend, or windows of it. A
        query row that may attend to nothing gives zeros (never NaN): padding blocks reach here.
        """
        return self.project(self.attend(self.queries(x, rotation), rows, mask, causal=causal))

    def project(self, out: Tensor) -> Tensor:
        """What attention gives [B, T, heads, v] -> [B, T, hidden]."""
        mixed: Tensor = self.o_proj(out.flatten(-2))
        return mixed

    def attend(
        self,
        queries: Sequence[Tensor],
        rows: Tensor,
        mask: Mask | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Queries as :meth:`queries` gives them over expanded ``rows`` -> [B, T, heads, v]."""
        d = self.dims
        nope, roped = queries
        latent, shared = torch.split(rows, [d.kv_lora, d.rope], -1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (d.heads, d.nope + d.v)).transpose(1, 2)
        key_nope, value = expanded.split([d.nope, d.v], -1)
        key_rope = shared.unsqueeze(1).expand(-1, d.heads, -1, -1)
        out = attend(
            torch.cat([nope, roped], -1).transpose(1, 2),
            torch.cat([key_nope, key_rope.to(key_nope.dtype)], -1),
            value,
            mask,
            causal=causal,
            scale=self.scale,
        )
        return out.transpose(1, 2)

    def prepare_serving(self) -> None:
        """Keep a plain copy of kv_b_proj for :meth:`attend_few`; needed before packing linears."""
        d = self.dims
        weight = plain_weight(self.kv_b_proj, self.kv_a_layernorm.weight.dtype)
        self._expansion = weight.view(d.heads, d.nope + d.v, d.kv_lora)

    def attend_few(self, queries: Sequence[Tensor], rows: Tensor, mask: Tensor | None) -> Tensor:
        """Absorbed: as :meth:`attend`, reading ``rows`` as they lie. Inference only."""
        d = self.dims
        nope, roped = queries
        expansion = self._expansion
        if isinstance(self.kv_b_proj, nn.Linear):
            # The live weight: a copy would be stale after a training step or a cast.
            expansion = self.kv_b_proj.weight.view(d.heads, d.nope + d.v, d.kv_lora)
        assert expansion is not None, "prepare_serving() must be called before packing"
        up_key, up_value = torch.split(expansion, [d.nope, d.v], 1)
        count, tokens = nope.shape[:2]
        lifted = torch.einsum("bthn,hnl->bhtl", nope, up_key.to(nope.dtype))
        query = torch.cat([lifted, roped.transpose(1, 2)], -1)
        # Heads are more queries over the same rows. As a batch of their own, they would each get a
        # copy of all rows first: three quarters of a draft pass for 32 requests on a CPU.
        scores = torch.bmm(query.flatten(1, 2), rows.transpose(1, 2)) * self.scale
        scores = scores.view(count, d.heads, tokens, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores.float(), dim=-1).to(rows.dtype)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)  # a row without keys gives zeros, not NaN
        latent = torch.bmm(weights.flatten(1, 2), rows[..., : d.kv_lora])
        latent = latent.view(count, d.heads, tokens, -1)
        return torch.einsum("bhtl,hvl->bthv", latent, up_value.to(latent.dtype))
