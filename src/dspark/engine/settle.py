"""Which tokens a verify step emits, for all requests of a batch.

Requests that are verified by one rule, sampled in one shape and drafted equally many tokens are
settled in the same tensor operations; each brings its own uniforms. A request without drafted
tokens (a prompt's first token, plain decoding) is the case n = 0 of the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.decoding.params import Shape
from dspark.decoding.sampling import safe_argmax, sample, target_probabilities
from dspark.decoding.verify import Rule, decide_greedy, decide_many
from dspark.engine.drafter import Block
from dspark.engine.sampler import RequestSampler


@dataclass(frozen=True)
class Claim:
    """Target ``logits`` [n + 1, V] behind ``output`` and each prefix of the n drafted tokens."""

    sampler: RequestSampler
    output: list[int]
    logits: Tensor
    block: Block | None = None

    @property
    def ids(self) -> list[int]:
        return [] if self.block is None else self.block.ids

    @property
    def drafted(self) -> int:
        """Tokens that were drafted, admitted or not."""
        return 0 if self.block is None else self.block.drafted


class Settled(NamedTuple):
    """``accepted`` drafted tokens stay, then comes ``following``."""

    accepted: int
    following: int


class _Kind(NamedTuple):
    """Claims of one kind are settled together."""

    rule: Rule
    shape: Shape | None
    drafted: int
    one_hot: bool


def settle(
    claims: Sequence[Claim], logits: Tensor, spread: Callable[[Tensor], Tensor]
) -> list[Settled]:
    """Decide ``claims``, in their order.

    ``logits`` [total, V] are those of all claims, one after the other; ``spread`` turns the draft's
    q over its own vocabulary into q over the target's.
    """
    kinds: dict[_Kind, list[int]] = {}
    for index, claim in enumerate(claims):
        sampler, count = claim.sampler, len(claim.ids)
        greedy = sampler.rule == "greedy"
        one_hot = claim.block is None or not claim.block.probs
        shape = None if greedy else sampler.params.shape
        kinds.setdefault(_Kind(sampler.rule, shape, count, one_hot), []).append(index)
    out: dict[int, Settled] = {}
    for kind, members in kinds.items():
        own = [claims[i] for i in members]
        rows = _rows(own, kind.drafted, logits if len(own) == len(claims) else None)
        decided = _greedy(own, rows) if kind.shape is None else _drawn(kind, own, rows, spread)
        out.update(zip(members, decided, strict=True))
    return [out[index] for index in range(len(claims))]


def _rows(claims: Sequence[Claim], drafted: int, whole: Tensor | None) -> Tensor:
    """Logits under the rules [R, n + 1, V]; a view of ``whole`` where nothing changes them."""
    if whole is not None and all(c.sampler.plain for c in claims):
        return torch.unflatten(whole, 0, (len(claims), drafted + 1))
    return torch.stack(
        [
            c.logits if c.sampler.plain else c.sampler.target_rows(c.logits, c.output, c.ids)
            for c in claims
        ]
    )


def _ids(claims: Sequence[Claim], device: torch.device) -> Tensor:
    ids = [claim.ids for claim in claims]
    return torch.tensor(ids, dtype=torch.int64, device=device).view(len(ids), -1)


def _greedy(claims: Sequence[Claim], rows: Tensor) -> list[Settled]:
    accepted, following = decide_greedy(safe_argmax(rows), _ids(claims, rows.device))
    return [Settled(*pair) for pair in zip(accepted.tolist(), following.tolist(), strict=True)]


def _drawn(
    kind: _Kind, claims: Sequence[Claim], rows: Tensor, spread: Callable[[Tensor], Tensor]
) -> list[Settled]:
    assert kind.shape is not None
    p = target_probabilities(rows.float(), kind.shape)
    accepted, chances = [0] * len(claims), p[:, 0]
    if kind.drafted:
        q = None
        if not kind.one_hot:
            q = spread(torch.stack([torch.stack(c.block.probs) for c in claims if c.block]))
        uniforms = [c.sampler.streams.uniform("accept", kind.drafted) for c in claims]
        u = torch.stack(uniforms).to(p.device)
        decided = decide_many(kind.rule, p, q, _ids(claims, p.device), u)
        accepted, chances = decided.accepted.tolist(), decided.next_probs
    last = torch.cat([c.sampler.streams.uniform("residual", 1) for c in claims]).to(p.device)
    following = sample(chances, last).tolist()
    return [Settled(*pair) for pair in zip(accepted, following, strict=True)]
