"""The two small heads of a draft: Markov (what follows what) and confidence (is it worth it).

The backbone predicts all slots of a block in parallel, so slot k does not know which token slot
k-1 became. The Markov head adds that dependency at rank r: ``logits_k += W2 . m_k`` where ``m_k``
depends on the previous token (paper section 3.1). Three variants of ``m_k``:

- vanilla: ``e = W1[x_{k-1}]``
- gated: ``sigmoid(G [h_k; e]) * e``
- rnn: ``(g, c, o) = J [s; e; h_k]``, ``s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``,
  ``m = tanh(o)``

Callers multiply ``m`` with ``W2`` themselves, because training fuses that product with the frozen
lm_head and never holds a whole [rows, vocabulary] tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.config.architecture import MarkovHeadType


class MarkovHead(nn.Module):
    """Low-rank dependency on the previous token; parameter names as in published checkpoints."""

    def __init__(self, kind: MarkovHeadType, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def start(self, like: Tensor) -> Tensor:
        """Initial state s_0 = 0 for leading shape of ``like`` [..., H] -> [..., r]."""
        return like.new_zeros(*like.shape[:-1], self.rank)

    def step(self, previous: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One slot: previous [...], h [..., H], state [..., r] -> (m, e, state), each [..., r]."""
        e: Tensor = self.markov_w1(previous)
        if self.kind == "vanilla":
            return e, e, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([h, e], -1))) * e, e, state
        gate, candidate, output = self.joint_proj(torch.cat([state, e, h], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), e, gate * state + (1 - gate) * torch.tanh(candidate)

    def block(self, previous: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced whole blocks: previous [..., K], h [..., K, H] -> (m, e) [..., K, r]."""
        if self.kind != "rnn":
            m, e, _ = self.step(previous, h, self.start(h))
            return m, e
        state = self.start(h[..., 0, :])
        features, embeddings = [], []
        for k in range(previous.shape[-1]):
            m, e, state = self.step(previous[..., k], h[..., k, :], state)
            features.append(m)
            embeddings.append(e)
        return torch.stack(features, -2), torch.stack(embeddings, -2)


class ConfidenceHead(nn.Module):
    """``w . [h_k ; W1[x_{k-1}]] + b``: logit that token k is accepted given its prefix was."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        """h [..., H], e [..., r] -> logits [...]."""
        logits: Tensor = self.proj(torch.cat([h, e.to(h.dtype)], -1))
        return logits.squeeze(-1)
