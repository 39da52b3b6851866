"""The walk of the Markov head through a block, whoever computed the block's states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

Bias = Callable[[int, Tensor], Tensor]


def draw_block(
    base: Tensor, anchors: Tensor, bias: Bias, sampling: Any | None, *, fp64: bool
) -> tuple[Tensor, Tensor | None]:
    """Tokens [R x K] slot by slot, and what they were drawn from [R x K, V] (None: argmax).

    Args:
        base: logits [R, K, V] before the Markov head.
        anchors: [R], the tokens before slot 0.
        bias: (slot, previous tokens [R]) -> [R, V]; called in the order of the slots.
        sampling: vLLM's metadata of the R requests; None takes the best token everywhere.
    """
    previous, tokens, probs = anchors, [], []
    for k in range(base.shape[1]):
        logits = base[:, k] + bias(k, previous)
        if sampling is None:
            previous = logits.argmax(dim=-1)
        else:
            previous, q = compute_probs_and_sample_next_token(logits, sampling, fp64)
            probs.append(q)
        previous = previous.long()
        tokens.append(previous)
    found = torch.stack(tokens, dim=1).flatten()
    return found, None if sampling is None else torch.stack(probs, dim=1).flatten(0, 1)
