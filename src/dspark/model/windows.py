"""Attention of many blocks over one sequence, without the empty parts of their mask.

Training lays A blocks of K rows behind S context rows. A block sees the context before its anchor
and itself, so of the A*K x (S + A*K) pairs of a dense mask most are forbidden, and yet a kernel
that gets a dense mask computes them all. Anchors ascend: neighbours see almost the same context.
Blocks are therefore cut into windows of neighbours, and each window attends to the context that its
blocks can see at all and to its own rows, under its part of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Queries ``rows`` (from, to) over context rows ``context`` (from, to) and their own.

    ``mask`` [B, 1, rows, context + rows] is boolean, True = may attend.
    """

    rows: tuple[int, int]
    context: tuple[int, int]
    mask: Tensor

    def of(self, every: Tensor, size: int) -> Tensor:
        """What the window reads of keys or values [B, heads, S + A*K, d] behind ``size`` = S."""
        context = every[:, :, slice(*self.context)]
        own = every[:, :, size + self.rows[0] : size + self.rows[1]]
        return torch.cat([context, own], 2)


@dataclass(frozen=True)
class Windows:
    """All queries, in windows one behind the other; ``size`` is the number of context rows."""

    size: int
    parts: tuple[Window, ...]

    def to(self, device: torch.device) -> Windows:
        """The same windows on ``device``."""
        moved = (Window(p.rows, p.context, p.mask.to(device)) for p in self.parts)
        return Windows(self.size, tuple(moved))


Mask = Tensor | Windows


def attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    *,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """q [B, heads, T, d] over key, value [B, kv_heads, N, d] -> [B, heads, T, dv].

    ``mask`` is boolean, broadcastable to [B, 1, T, N], True = may attend; or windows. A query that
    may attend to nothing gives zeros (never NaN).
    """
    if not isinstance(mask, Windows):
        return F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa
        )
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, slice(*w.rows)],
            w.of(key, mask.size),
            w.of(value, mask.size),
            attn_mask=w.mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        for w in mask.parts
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
