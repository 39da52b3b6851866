"""Attention of many blocks over one sequence, without the empty parts of their mask.

Training lays A blocks of K rows behind S context rows. A block sees the context before its anchor
and itself, so of the A*K x (S + A*K) pairs of a dense mask most are forbidden, and yet a kernel
that gets a dense mask computes them all. Anchors ascend: neighbours see almost the same context.
Blocks are therefore cut into windows of neighbours, and each window attends to the context that its
blocks can see at all; a block's own K rows are a product of their own. Keys and values are read as
they lie.

That is the form for CPUs, which hold probabilities anyway. On CUDA ``flex_attention`` holds none,
compiles the predicate itself into its kernel and skips empty tiles (a ``BlockMask``); other devices
get the mask as a whole (:meth:`Windows.whole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Window:
    """Queries ``rows`` (from, to) over context rows ``context`` (from, to) and their own blocks.

    ``mask`` [B, 1, rows, context] is boolean, True = may attend.
    """

    rows: tuple[int, int]
    context: tuple[int, int]
    mask: Tensor


@dataclass(frozen=True)
class Windows:
    """All queries, blocks of ``block`` rows, in windows one behind the other; ``size`` is the
    number of context rows."""

    size: int
    block: int
    parts: tuple[Window, ...]

    def to(self, device: torch.device) -> Windows:
        """The same windows on ``device``."""
        moved = (Window(p.rows, p.context, p.mask.to(device)) for p in self.parts)
        return Windows(self.size, self.block, tuple(moved))

    def whole(self) -> Tensor:
        """The dense mask [B, 1, A*K, S + A*K]."""
        first, count = self.parts[0].mask, self.parts[-1].rows[1]
        mask = first.new_zeros(first.shape[0], 1, count, self.size + count)
        for part in self.parts:
            mask[:, :, slice(*part.rows), slice(*part.context)] = part.mask
        blocks = torch.arange(count, device=first.device) // self.block
        mask[..., self.size :] = blocks.unsqueeze(-1) == blocks
        return mask


Mask = Union[Tensor, Windows, "BlockMask"]


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

    ``mask`` is boolean, broadcastable to [B, 1, T, N], True = may attend; or windows, or a
    ``BlockMask``. A query that may attend to nothing gives zeros (never NaN).
    """
    if isinstance(mask, Windows):
        return _in_windows(q, key, value, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and not isinstance(mask, Tensor):
        device = q.device.type
        # Autocast does not know this operator: what SDPA would be given, it is given.
        wide = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        q, key, value = (x.to(wide) for x in (q, key, value))
        out: Tensor = _flex(device)(
            q, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out
    return F.scaled_dot_product_attention(
        q, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )


@cache
def _flex(device: str) -> Callable[..., Any]:
    """``flex_attention``, compiled where it has kernels: as it is, it writes all scores out."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=True) if device == "cuda" else kernel


def _in_windows(q: Tensor, key: Tensor, value: Tensor, windows: Windows, scale: float) -> Tensor:
    batch, heads, count, width = q.shape
    kv_heads, size, block = key.shape[1], windows.size, windows.block
    group = heads // kv_heads
    # Contiguous once, so that every window is a view of them and nothing is kept twice.
    key, value = key.contiguous(), value.contiguous()
    # Query heads of one key head side by side: [B, kv_heads, group, A, K, d].
    grouped = (q * scale).contiguous().view(batch, kv_heads, group, -1, block, width)
    own_key = key[:, :, size:].unflatten(2, (-1, block)).unsqueeze(2)
    own_value = value[:, :, size:].unflatten(2, (-1, block)).unsqueeze(2)
    own = torch.matmul(grouped, own_key.transpose(-1, -2))
    out = []
    for part in windows.parts:
        low, high = part.context
        blocks = slice(part.rows[0] // block, part.rows[1] // block)
        asked = grouped[:, :, :, blocks].flatten(2, 4)
        seen = torch.matmul(asked, key[:, :, low:high].transpose(-1, -2))
        seen = seen.view(batch, kv_heads, group, -1, high - low)
        seen = seen.masked_fill(~part.mask.unsqueeze(1), -math.inf)
        scores = torch.cat([seen, own[:, :, :, blocks].flatten(3, 4)], -1)
        wide = torch.float32 if scores.dtype.itemsize < 4 else scores.dtype
        weights = torch.softmax(scores, -1, dtype=wide).to(value.dtype)
        mixed = torch.matmul(weights[..., : high - low].flatten(2, 3), value[:, :, low:high])
        mine = weights[..., high - low :].unflatten(3, (-1, block))
        inner = torch.matmul(mine, own_value[:, :, :, blocks]).flatten(3, 4)
        out.append(mixed.view(inner.shape) + inner)
    return torch.cat(out, 3).view(batch, heads, count, -1)
