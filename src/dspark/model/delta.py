"""The gated delta rule with a decay per channel (KDA), in the form that rollback needs.

One head keeps a matrix S [dk, dv]. A token of key k, value v, log decay g [dk], strength b does

    S <- diag(exp g) S,    u = b (v - S^T k),    S <- S + k u^T,    out = S^T q

(Kimi Linear, arXiv 2510.26692, section 3). Over a block of tokens this is solved at once: with G_i
the decays summed up to token i, the corrections u are the solution of one unit triangular system,
and for EVERY c the state after the block's first c tokens is

    S_c = diag(exp G_c) S_0 + sum over j < c of (k_j exp(G_c - G_j)) u_j^T

So a block that is verified needs no snapshot per token: keys, corrections and decays of its few
tokens are kept, and accepting c of them is one small product per head (:func:`state_after`), with
another c for every request. Exponents are differences G_i - G_j of j <= i, never positive: nothing
overflows however strong the decay is.

Everything is float32, as transformers' and fla's kernels have it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # tokens solved at once; the pairwise decays take BLOCK^2 * dk numbers a head


class Updates(NamedTuple):
    """What some tokens do to a state: ``key`` and ``decay`` (summed logarithms, [B, H, T, dk]),
    ``correction`` [B, H, T, dv]."""

    key: Tensor
    correction: Tensor
    decay: Tensor


def l2_normalised(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, as fla defines it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def solve_block(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Updates]:
    """One block behind ``state`` [B, H, dk, dv].

    Args:
        query, key: [B, H, T, dk], normalised, the query scaled.
        value: [B, H, T, dv].
        decay: log decays [B, H, T, dk], at most 0.
        strength: [B, H, T].

    Returns:
        (out [B, H, T, dv], updates). A token with decay 0 and strength 0 changes no state.
    """
    summed = decay.cumsum(-2)
    grown = summed.exp()
    length = key.shape[-2]
    seen = torch.cat([key * grown, query * grown], -2) @ state
    missing = (value - seen[..., :length, :]) * strength.unsqueeze(-1)
    out = seen[..., length:, :]
    if length == 1:
        fresh = (query * key).sum(-1, keepdim=True)
        return out + fresh * missing, Updates(key, missing, summed)
    between = summed.unsqueeze(-2) - summed.unsqueeze(-3)  # [B, H, i, j, dk]
    later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    weights = between.masked_fill_(later.unsqueeze(-1), -torch.inf).exp_()
    pairs = (weights * key.unsqueeze(-3)) @ torch.stack([key, query], -1)  # [B, H, i, j, 2]
    mixing = pairs[..., 0].tril(-1) * strength.unsqueeze(-1)
    system = mixing + torch.eye(length, dtype=key.dtype, device=key.device)
    correction = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    return out + pairs[..., 1] @ correction, Updates(key, correction, summed)


def state_after(state: Tensor, updates: Updates, count: Tensor | None) -> Tensor:
    """The state behind the first ``count`` [B] tokens of a block that began at ``state``.

    ``count`` None is all of them. 0 gives ``state`` itself, bit by bit.
    """
    key, correction, decay = updates
    if count is None:
        last = decay[..., -1:, :]
        kept = key * (last - decay).exp_()
    else:
        index = (count - 1).clamp_min(0).view(-1, 1, 1, 1)
        last = decay.gather(-2, index.expand(-1, decay.shape[1], 1, decay.shape[-1]))
        last = last * (count > 0).view(-1, 1, 1, 1)
        steps = torch.arange(decay.shape[-2], device=decay.device)
        dropped = (steps >= count.unsqueeze(-1)).unsqueeze(1).unsqueeze(-1)
        kept = key * (last - decay).masked_fill_(dropped, -torch.inf).exp_()
    return state * last.exp().transpose(-1, -2) + kept.transpose(-1, -2) @ correction


def solve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    state: Tensor,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Updates]:
    """Any number of tokens: arguments as in :func:`solve_block`.

    Returns:
        (out, start, updates): ``updates`` are those of the last ``min(T, block)`` tokens, and
        ``start`` is the state in front of them.
    """
    length = key.shape[-2]
    first = length % block if length > block else length
    bounds = [0, *range(first, length + 1, block)] if first else [*range(0, length + 1, block)]
    outs = []
    for begin, end in itertools.pairwise(bounds):
        part = [x[:, :, begin:end] for x in (query, key, value, decay, strength)]
        out, updates = solve_block(part[0], part[1], part[2], part[3], part[4], state)
        outs.append(out)
        if end < length:
            state = state_after(state, updates, None)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, -2)), state, updates
