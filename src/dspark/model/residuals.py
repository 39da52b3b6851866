"""Attention residuals of Kimi-K3: what a layer reads is a mixture over depth (report, section 2.2).

The residual stream is cut into blocks of ``residual_block`` layers. A layer reads not the sum of
everything before it but a softmax mixture of the *bank* (the stream as it was where each block
began, the first being the embedding) and the *prefix*, the sum of this block's layers so far:

    weights = softmax over sources of  w . (source / rms(source)),    w = norm * proj

Attention and MLP of a layer, and the final norm, each have their own w; mixing is per token and in
float32. The first layer of a block pushes the prefix onto the bank and starts a new one.

Two streams can be tapped behind layer i (vllm-project/vllm #50487): the *prefix sum*, which is what
engines hand to drafts by default, and the *mixed* stream, which is what layer i + 1 really reads.
They have one shape and different values: a draft must be served with the one it was trained on.

Sources: moonshotai/Kimi-K3 ``modeling_kimi_linear.py`` as described by its ports
(NVIDIA-NeMo/Automodel kimi_k3, ggml-org/llama.cpp #26185), arXiv 2607.24653.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TappedStream = Literal["prefix_sum", "mixed"]


class ResidualMix(nn.Module):
    """One mixture over depth."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.proj = nn.Parameter(torch.zeros(hidden))
        self.eps = eps

    def forward(self, bank: list[Tensor], prefix: Tensor) -> Tensor:
        """Mixture of ``bank`` and ``prefix``, [..., H] each, in their dtype."""
        sources = torch.stack([*bank, prefix], -2).float()
        weight = self.norm.float() * self.proj.float()
        scores = F.rms_norm(sources, sources.shape[-1:], None, self.eps) @ weight
        mixed = torch.softmax(scores, -1).unsqueeze(-2) @ sources
        return mixed.squeeze(-2).to(prefix.dtype)
