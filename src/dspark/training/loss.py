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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.layers import product_with

CPU_CHUNK = 20 * 2**20  # bytes of one [chunk, V'] tensor in fp32


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


def rows_at_once(chunk: int, vocabulary: int, device: str) -> int:
    """Rows of a chunk: ``chunk``, but on a CPU no more than fit into :data:`CPU_CHUNK` bytes.

    Larger tensors gain nothing there: they fall out of the caches, and are mapped anew, page by
    page, every time they are made.
    """
    if device != "cpu":
        return chunk
    return min(chunk, max(16, CPU_CHUNK // (4 * vocabulary)))


def _targets(
    t: Tensor, log_z: Tensor | None, head: Callable[[Tensor], Tensor], source: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """p over the support [R, V'], the target mass outside it [R] and argmax p [R, 1].

    Rows of one ``source`` that lie together have one distribution, which is computed once: blocks
    overlap, and with many anchors most slots ask for a position that another block asks for too.
    """
    distinct, back, sizes = torch.unique_consecutive(
        source, return_inverse=True, return_counts=True
    )
    again = len(distinct) < len(source)
    first = sizes.cumsum(0) - sizes
    p = head(t[first] if again else t)
    if log_z is None:
        p = torch.softmax(p, -1)
        outside = p.new_zeros(len(p))
    else:
        p = p.sub_((log_z[first] if again else log_z).unsqueeze(-1)).exp_()
        outside = (1 - p.sum(-1)).clamp_min(0)
    choice = p.argmax(-1, keepdim=True)
    return (p[back], outside[back], choice[back]) if again else (p, outside, choice)


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
        source: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h [R, H], m [R, r], w2 [V', r], head [V', H], t [R, H], labels [R] (-1: outside)."""
        grad_h, grad_m, grad_w2 = torch.empty_like(h), torch.empty_like(m), torch.zeros_like(w2)
        ce, l1, agree = (h.new_empty(len(h)) for _ in range(3))
        logits_of = product_with(head)
        chunk = rows_at_once(chunk, len(head), head.device.type)
        for start in range(0, len(h), chunk):
            s = slice(start, start + chunk)
            p, outside, choice = _targets(
                t[s], None if log_z is None else log_z[s], logits_of, source[s]
            )
            # Three tensors of [chunk, V'] are alive from here on, changed in place.
            logits = logits_of(h[s]).addmm_(m[s], w2.T)
            q = torch.softmax(logits, -1)
            inside = labels[s] >= 0
            picked = labels[s].clamp_min(0).unsqueeze(-1)
            most = q.amax(-1)
            # The largest logit and its probability (at least 1/V) give the sum of exponentials.
            log_sum = logits.amax(-1) - most.log()
            ce[s] = torch.where(inside, log_sum - logits.gather(-1, picked).squeeze(-1), 0.0)
            agree[s] = (q.gather(-1, choice).squeeze(-1) >= most).to(h.dtype)
            difference = torch.sub(q, p, out=p)
            sign = torch.sign(difference, out=logits)
            # Not linalg.vector_norm: its sums over a large vocabulary are off by 4e-5.
            l1[s] = torch.linalg.vecdot(difference, sign) + outside
            # d L1 / d logits = q * (sign(q - p) - sum_v q_v sign_v); d CE / d logits = q - onehot.
            mean = torch.linalg.vecdot(q, sign).unsqueeze(-1)
            weight = torch.where(inside, ce_weight[s], 0.0).unsqueeze(-1)
            share = l1_weight[s].unsqueeze(-1)
            grad = sign.mul_(share).add_(weight - share * mean).mul_(q)
            grad.scatter_add_(-1, picked, -weight)
            grad_h[s] = grad @ head
            grad_m[s] = grad @ w2
            grad_w2.addmm_(grad.T, m[s])
            # Or the next chunk would begin beside the tensors of this one.
            del p, q, logits, difference, sign, grad
        ctx.save_for_backward(grad_h, grad_m, grad_w2)
        ctx.mark_non_differentiable(ce, l1, agree)
        loss = (ce * ce_weight).sum() + (l1 * l1_weight).sum()
        return loss, ce, l1, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_m, grad_w2 = ctx.saved_tensors
        scale = grads[0]
        return (grad_h * scale, grad_m * scale, grad_w2 * scale, *(None,) * 8)


@dataclass(frozen=True)
class LossInputs:
    """Supervised rows only, flattened. R rows, H hidden, r Markov rank, V' support size.

    ``source`` [R] tells which rows have the same ``t`` and ``log_z``; those that are neighbours
    share the work. None: no two of them.
    """

    h: Tensor
    m: Tensor
    t: Tensor
    log_z: Tensor | None
    labels: Tensor
    weight: Tensor
    confidence: Tensor
    source: Tensor | None = None


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
    source = rows.source
    if source is None:
        source = torch.arange(len(rows.h), device=rows.h.device)
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
        source,
        chunk,
    )
    stats = RowStats(ce, l1, agree, (rows.labels >= 0).to(ce.dtype))
    bce = F.binary_cross_entropy_with_logits(
        rows.confidence.float(), stats.acceptance.float(), reduction="none"
    )
    terms = {"draft": fused, "confidence": conf_c * (bce * weight.float()).sum()}
    return terms, stats
