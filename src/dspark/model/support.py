"""A draft vocabulary inside a standard checkpoint.

A draft that proposes only the few thousand tokens its workload uses is several times cheaper to
train. Checkpoints have no field for that (``draft_vocab_size = vocab_size``), but a vanilla Markov
head can say it: one spare rank whose ``W1`` column is 1 for every token and whose ``W2`` column is
0 for kept tokens and -10,000 for the others adds exactly that bias to every slot, in every engine
that knows the published format. Verification keeps the output exact; only acceptance is capped by
the target's mass outside the vocabulary.

The spare rank is all zeros during training. Its gradients are then zero too (each factor's gradient
contains the other), so it needs no special care until :func:`fold_support`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.model.draft import DSparkDraft

OUTSIDE_BIAS = -10_000.0


def clear_spare_rank(draft: DSparkDraft) -> None:
    """Reserve the last Markov rank for :func:`fold_support`."""
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[:, -1] = 0
        draft.markov_head.markov_w2.weight[:, -1] = 0
        draft.confidence_head.proj.weight[:, -1] = 0


def fold_support(draft: DSparkDraft, support: Tensor) -> None:
    """Write the vocabulary into the spare rank; the draft then proposes nothing else."""
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[:, -1] = 1
        column = torch.full_like(draft.markov_head.markov_w2.weight[:, -1], OUTSIDE_BIAS)
        column[support] = 0
        draft.markov_head.markov_w2.weight[:, -1] = column


def read_support(draft: DSparkDraft) -> Tensor | None:
    """The folded vocabulary [V'] ascending, or None when the draft proposes any token."""
    if draft.config.markov_head_type != "vanilla":
        return None
    w1, w2 = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    if not bool((w1[:, -1] == 1).all()) or not bool((w2[:, -1] <= OUTSIDE_BIAS / 2).any()):
        return None
    return (w2[:, -1] == 0).nonzero().squeeze(-1)
