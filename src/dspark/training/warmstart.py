"""Starts that know something before the first step: another draft's weights, or bigrams.

From scratch the draft's q and the target's p hardly overlap and L1 has almost no gradient. Counting
which token follows which in the answers, and factoring the log-probabilities to the head's rank,
gives the draft a bigram model in a second or two, and the optimiser starts from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark.config.resolve import differences
from dspark.errors import TrainingError
from dspark.model.draft import DSparkDraft
from dspark.model.support import read_support


class Spoken(Protocol):
    """What is counted of a record or an answer: ids [S] and loss mask [S]."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def loss_mask(self) -> Tensor: ...


MAX_COUNTED = 8192  # tokens of the dense count matrix (256 MiB in fp32)


def choose_support(records: Iterable[Spoken], vocab_size: int, size: int) -> Tensor:
    """The ``size`` most frequent answer tokens, ascending ids; ties go to the lower id."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for record in records:
        answer = record.ids[record.loss_mask.bool()].long()
        counts += torch.bincount(answer, minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(size, vocab_size)].sort().values


def bigram_counts(records: Iterable[Spoken], support: Tensor, vocab_size: int) -> Tensor:
    """Counts [V', V'] fp32 of answer bigrams whose both tokens are in ``support``."""
    index = torch.full((vocab_size,), -1, dtype=torch.long)
    index[support] = torch.arange(len(support))
    counts = torch.zeros(len(support) ** 2)
    for record in records:
        tokens = index[record.ids[record.loss_mask.bool()].long()]
        pairs = (tokens[:-1], tokens[1:])
        inside = (pairs[0] >= 0) & (pairs[1] >= 0)
        flat = pairs[0][inside] * len(support) + pairs[1][inside]
        counts += torch.bincount(flat, minlength=len(counts)).float()
    return counts.view(len(support), -1)


def bigram_factors(counts: Tensor, rank: int, smoothing: float = 2.0) -> tuple[Tensor, Tensor]:
    """Rank-``rank`` factors (W1 [V', r], W2 [V', r]) of smoothed log P(next | previous).

    Rows are weighted by the square root of their count, so that frequent tokens are fitted best.
    Each row is centred, which a softmax cannot see.
    """
    total = counts.sum(-1, keepdim=True)
    unigram = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * len(counts))
    log_p = torch.log((counts + smoothing * unigram) / (total + smoothing))
    log_p -= log_p.mean(-1, keepdim=True)
    weight = torch.sqrt(total + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(log_p * weight, q=min(rank + 8, len(counts)), niter=3)
    kept = min(rank, len(s))
    root = torch.sqrt(s[:kept])
    w1, w2 = u[:, :kept] * root / weight, v[:, :kept] * root
    # Balance the two factors: the optimiser treats both alike.
    balance = torch.sqrt(w2.norm(dim=0) / w1.norm(dim=0).clamp_min(1e-8))
    return w1 * balance, w2 / balance


def continue_from(
    draft: DSparkDraft, start: DSparkDraft, vocabulary_size: int | None
) -> Tensor | None:
    """Give ``draft`` the weights of ``start`` (its embedding stays) and return their vocabulary.

    A vocabulary folded into ``start`` is kept as it is: its other tokens were never learnt, and the
    rank it lies in must stay spare.

    Raises:
        TrainingError: sizes differ, or ``start`` has another draft vocabulary than asked for; lists
            all that differs.
    """
    faults = differences(draft.config, start.config)
    support = read_support(start)
    found = None if support is None else len(support)
    if found != vocabulary_size:
        faults.append(f"vocabulary_size {found} instead of {vocabulary_size}")
    if not faults and not _is_rounded(start.embed_tokens.weight, draft.embed_tokens.weight):
        faults.append("embed_tokens of another target")
    if faults:
        raise TrainingError(
            expected="a draft of the same flavour, sizes and conventions",
            found="; ".join(faults),
            where="train.init_from",
            fix="Set the recipe's draft section to what that draft has, or start from another one.",
        )
    kept = {n: w for n, w in start.state_dict().items() if n != "embed_tokens.weight"}
    draft.load_state_dict(kept, strict=False)
    return support


def _is_rounded(stored: Tensor, exact: Tensor) -> bool:
    """Whether ``stored`` is ``exact`` as some checkpoint dtype holds it."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return any(torch.equal(stored.float(), exact.to(dtype).float()) for dtype in dtypes)


def warm_start_markov(
    draft: DSparkDraft, records: Sequence[Spoken], support: Tensor | None
) -> None:
    """Overwrite a vanilla Markov head with the answers' bigrams (spare rank untouched)."""
    head = draft.markov_head
    vocab = draft.config.vocab_size
    rows = choose_support(records, vocab, MAX_COUNTED) if support is None else support
    usable = head.rank if support is None else head.rank - 1
    w1, w2 = bigram_factors(bigram_counts(records, rows, vocab), usable)
    with torch.no_grad():
        head.markov_w1.weight[:, : w1.shape[1]] = 0
        head.markov_w2.weight[:, : w2.shape[1]] = 0
        head.markov_w1.weight[rows, : w1.shape[1]] = w1
        head.markov_w2.weight[rows, : w2.shape[1]] = w2
