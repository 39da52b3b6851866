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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.products import product

CPU_CHUNK = 20 * 2**20  # bytes of one [chunk, V'] tensor in fp32
CPU_PART = 2**20  # of which so many are worked on at a time between the products


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


def _parts(start: int, stop: int, vocabulary: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Rows of a chunk (counted from its first one, and from the first of all) in parts.

    Between the products a chunk is read and written ten times, and on a CPU a part of it stays in
    the core's own cache meanwhile. Elsewhere parts only bound what is held beside the chunk.
    """
    size = stop - start
    each = max(1, CPU_PART // (4 * vocabulary)) if device == "cpu" else -(-size // 4)
    for first in range(0, size, each):
        last = min(size, first + each)
        yield slice(first, last), slice(start + first, start + last)


@dataclass(frozen=True)
class _Targets:
    """The target's distributions at a chunk's D distinct positions: p over the support [D, V'], the
    mass outside it [D] and argmax p [D, 1]. ``back`` [R] is the one of every row.
    """

    p: Tensor
    outside: Tensor
    choice: Tensor
    back: Tensor

    @staticmethod
    def of(t: Tensor, log_z: Tensor | None, head: Tensor, source: Tensor) -> _Targets:
        """Rows of one ``source`` that lie together have one distribution, computed once: blocks
        overlap, and with many anchors most slots ask for a position that another block asks for.
        """
        _, back, sizes = torch.unique_consecutive(source, return_inverse=True, return_counts=True)
        first = sizes.cumsum(0) - sizes
        p = product(t[first], head)
        if log_z is None:
            torch.softmax(p, -1, out=p)
            outside = p.new_zeros(len(p))
        else:
            p.sub_(log_z[first].unsqueeze(-1)).exp_()
            outside = (1 - p.sum(-1)).clamp_min(0)
        return _Targets(p, outside, p.argmax(-1, keepdim=True), back)

    def at(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """p (a copy), outside and choice of ``rows``."""
        back = self.back[rows]
        return self.p[back], self.outside[back], self.choice[back]


def _finish(
    logits: Tensor,
    target: tuple[Tensor, Tensor, Tensor],
    labels: Tensor,
    ce_weight: Tensor,
    l1_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """ce, l1 and agree of rows [R]; their ``logits`` [R, V'] become the loss's gradient for them.

    ``target`` is :meth:`_Targets.at`, whose p is used up.
    """
    p, outside, choice = target
    q = torch.softmax(logits, -1)
    inside = labels >= 0
    picked = labels.clamp_min(0).unsqueeze(-1)
    most = q.amax(-1)
    # The largest logit and its probability (at least 1/V) give the sum of exponentials.
    log_sum = logits.amax(-1) - most.log()
    ce = torch.where(inside, log_sum - logits.gather(-1, picked).squeeze(-1), 0.0)
    agree = (q.gather(-1, choice).squeeze(-1) >= most).to(q.dtype)
    difference = torch.sub(q, p, out=p)
    sign = torch.sign(difference, out=logits)
    # Not linalg.vector_norm: its sums over a large vocabulary are off by 4e-5.
    l1 = torch.linalg.vecdot(difference, sign) + outside
    # d L1 / d logits = q * (sign(q - p) - sum_v q_v sign_v); d CE / d logits = q - onehot.
    mean = torch.linalg.vecdot(q, sign).unsqueeze(-1)
    weight = torch.where(inside, ce_weight, 0.0).unsqueeze(-1)
    share = l1_weight.unsqueeze(-1)
    sign.mul_(share).add_(weight - share * mean).mul_(q).scatter_add_(-1, picked, -weight)
    return ce, l1, agree


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
        learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h [R, H], m [R, r], w2 [V', r], head [V', H], t [R, H], labels [R] (-1: outside).

        ``learns``: whether anybody will ask for the gradients, half of the work.
        """
        grad_h, grad_m = torch.empty_like(h), torch.empty_like(m)
        grad_w2 = w2.new_zeros(w2.shape[::-1])
        ce, l1, agree = (h.new_empty(len(h)) for _ in range(3))
        device = head.device.type
        chunk = rows_at_once(chunk, len(head), device)
        for start in range(0, len(h), chunk):
            s = slice(start, min(len(h), start + chunk))
            # Two tensors of [chunk, V'] are alive at any time, besides a part's.
            logits = product(h[s], head)
            logits += product(m[s], w2)
            targets = _Targets.of(t[s], None if log_z is None else log_z[s], head, source[s])
            for part, rows in _parts(s.start, s.stop, len(head), device):
                ce[rows], l1[rows], agree[rows] = _finish(
                    logits[part], targets.at(part), labels[rows], ce_weight[rows], l1_weight[rows]
                )
            del targets
            if learns:
                grad_h[s] = product(logits, head.T)
                grad_m[s] = product(logits, w2.T)
                grad_w2 += product(m[s].T, logits.T)
            del logits  # or the next chunk would begin beside it
        ctx.save_for_backward(grad_h, grad_m, grad_w2)
        ctx.mark_non_differentiable(ce, l1, agree)
        loss = (ce * ce_weight).sum() + (l1 * l1_weight).sum()
        return loss, ce, l1, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_m, grad_w2 = ctx.saved_tensors
        scale = grads[0]
        return (grad_h * scale, grad_m * scale, (grad_w2 * scale).T, *(None,) * 9)


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
        torch.is_grad_enabled(),
    )
    stats = RowStats(ce, l1, agree, (rows.labels >= 0).to(ce.dtype))
    bce = F.binary_cross_entropy_with_logits(
        rows.confidence.float(), stats.acceptance.float(), reduction="none"
    )
    terms = {"draft": fused, "confidence": conf_c * (bce * weight.float()).sum()}
    return terms, stats
