"""The DSpark loss, fused with the vocabulary projection and computed in chunks of rows.

``0.1 * CE(text token) + 0.9 * L1(q, p) + BCE(confidence)``, slot weight ``exp(-k / g)``, everything
normalised by the sum of weights over the whole accumulation window (contract, section 4).

Logits of a whole step would be the largest tensor of training by far (2.19 GiB in fp32 at Kimi-K3
size for 512 anchors), so :class:`FusedDraftLoss` forms the gradient of its inputs in the forward
pass, chunk by chunk, and keeps only gradients of the size of its inputs. Draft logits are
``h @ W^T + m @ W2^T``: frozen lm_head plus Markov head.

A draft vocabulary (``support``) restricts both matrices to a few thousand rows. The loss is still
the exact one for a draft that never proposes anything else: with the target's ``log_z`` known,
``p`` of the kept tokens is exact, and the mass outside enters L1 as what q misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def slot_weights(block_size: int, decay: float) -> Tensor:
    """w_k = exp(-k / decay), fp32 [K]."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay)


@dataclass(frozen=True)
class RowStats:
    """Per supervised row [R], fp32: cross entropy, L1 distance (0..2), greedy agreement (0/1), and
    whether the label is inside the draft vocabulary (0/1): where it is not, ``ce`` is 0 and means
    nothing.
    """

    ce: Tensor
    l1: Tensor
    agree: Tensor
    inside: Tensor

    @property
    def acceptance(self) -> Tensor:
        """c* = clamp(1 - L1/2, 0, 1): probability that standard verification accepts the slot."""
        return (1 - self.l1 / 2).clamp(0, 1)


def _target_probs(t: Tensor, log_z: Tensor | None, head: Tensor) -> tuple[Tensor, Tensor]:
    """p over the support [R, V'] and the target mass outside it [R]."""
    logits = t @ head.T
    if log_z is None:
        return torch.softmax(logits, -1), logits.new_zeros(len(t))
    p = torch.exp(logits - log_z.unsqueeze(-1))
    return p, (1 - p.sum(-1)).clamp_min(0)


class FusedDraftLoss(torch.autograd.Function):
    """sum_r (ce_weight_r * CE_r + l1_weight_r * L1_r); gradients for h, m and W2 only."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        m: Tensor,
        w2: Tensor,
        head: Tensor,
        t: Tensor,
        log_z: Tensor | None,
        labels: Tensor,
        ce_weight: Tensor,
        l1_weight: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h [R, H], m [R, r], w2 [V', r], head [V', H], t [R, H], labels [R] (-1: outside)."""
        grad_h, grad_m, grad_w2 = torch.empty_like(h), torch.empty_like(m), torch.zeros_like(w2)
        ce, l1, agree = (h.new_empty(len(h)) for _ in range(3))
        for start in range(0, len(h), chunk):
            s = slice(start, start + chunk)
            logits = torch.addmm(h[s] @ head.T, m[s], w2.T)
            log_q = torch.log_softmax(logits, -1)
            p, outside = _target_probs(t[s], None if log_z is None else log_z[s], head)
            inside = labels[s] >= 0
            picked = labels[s].clamp_min(0).unsqueeze(-1)
            ce[s] = torch.where(inside, -log_q.gather(-1, picked).squeeze(-1), 0.0)
            agree[s] = (logits.argmax(-1) == p.argmax(-1)).to(h.dtype)
            q = log_q.exp_()
            difference = q - p
            l1[s] = difference.abs().sum(-1) + outside
            # d L1 / d logits = q * (sign(q - p) - sum_v q_v sign_v); d CE / d logits = q - onehot.
            sign = difference.sign_()
            grad = sign.sub_((q * sign).sum(-1, keepdim=True)).mul_(q)
            grad.mul_(l1_weight[s].unsqueeze(-1))
            weight = torch.where(inside, ce_weight[s], 0.0).unsqueeze(-1)
            grad.add_(q.mul_(weight)).scatter_add_(-1, picked, -weight)
            grad_h[s] = grad @ head
            grad_m[s] = grad @ w2
            grad_w2.addmm_(grad.T, m[s])
        ctx.save_for_backward(grad_h, grad_m, grad_w2)
        ctx.mark_non_differentiable(ce, l1, agree)
        loss = (ce * ce_weight).sum() + (l1 * l1_weight).sum()
        return loss, ce, l1, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_m, grad_w2 = ctx.saved_tensors
        scale = grads[0]
        return (grad_h * scale, grad_m * scale, grad_w2 * scale, *(None,) * 7)


@dataclass(frozen=True)
class LossInputs:
    """Supervised rows only, flattened. R rows, H hidden, r Markov rank, V' support size."""

    h: Tensor
    m: Tensor
    t: Tensor
    log_z: Tensor | None
    labels: Tensor
    weight: Tensor
    confidence: Tensor


def draft_loss(
    rows: LossInputs,
    head: Tensor,
    w2: Tensor,
    *,
    coefficients: tuple[float, float, float],
    denominator: Tensor | float,
    chunk: int,
) -> tuple[dict[str, Tensor], RowStats]:
    """The three weighted terms (their sum is the loss) and per-row statistics.

    ``coefficients`` are (ce, l1, confidence). ``denominator`` is the sum of slot weights over ALL
    ranks and the WHOLE accumulation window, known before any forward because it depends on masks
    only; that makes 1 x N accumulation equal N x 1 exactly.
    """
    ce_c, l1_c, conf_c = coefficients
    weight = (rows.weight / denominator).to(rows.h.dtype)
    fused, ce, l1, agree = FusedDraftLoss.apply(  # type: ignore[no-untyped-call]
        rows.h,
        rows.m,
        w2,
        head,
        rows.t,
        rows.log_z,
        rows.labels,
        weight * ce_c,
        weight * l1_c,
        chunk,
    )
    stats = RowStats(ce, l1, agree, (rows.labels >= 0).to(ce.dtype))
    bce = F.binary_cross_entropy_with_logits(
        rows.confidence.float(), stats.acceptance.float(), reduction="none"
    )
    terms = {"draft": fused, "confidence": conf_c * (bce * weight.float()).sum()}
    return terms, stats
