"""The bigram start of the Markov head, and the draft vocabulary folded into its spare rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import (
    VOCAB,
    one_thread,  # noqa: F401 (autouse)
    record_of,
    target_parts,
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)
from torch import Tensor

from dspark.model.support import clear_spare_rank, fold_support, read_support
from dspark.training.stage import support_coverage
from dspark.training.trainer import Trainer
from dspark.training.warmstart import (
    bigram_counts,
    bigram_factors,
    choose_support,
    warm_start_markov,
)

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 8)
SUPPORT = choose_support(RECORDS, VOCAB, 30)


def answers() -> list[list[int]]:
    return [r.ids[r.loss_mask.bool()].tolist() for r in RECORDS]


def smoothed(counts: Tensor, smoothing: float = 2.0) -> Tensor:
    """log P(next | previous) with a unigram prior, straight from its definition."""
    counts = counts.double()
    unigram = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * len(counts))
    joint = counts + smoothing * unigram
    return torch.log(joint / joint.sum(-1, keepdim=True))


def test_the_support_is_the_most_frequent_answer_tokens() -> None:
    counts = Counter(token for ids in answers() for token in ids)
    kept = set(SUPPORT.tolist())
    assert SUPPORT.tolist() == sorted(kept)
    assert len(kept) == 30
    assert min(counts[t] for t in kept) >= max(counts[t] for t in range(VOCAB) if t not in kept)
    inside = sum(counts[t] for t in kept)
    assert support_coverage(RECORDS, SUPPORT) == pytest.approx(inside / counts.total())
    assert choose_support(RECORDS, VOCAB, 10_000).tolist() == list(range(VOCAB))


def test_bigrams_are_counted_in_answers_only_and_inside_the_support_only() -> None:
    want = Counter(
        (a, b)
        for ids in answers()
        for a, b in zip(ids, ids[1:], strict=False)
        if a in SUPPORT and b in SUPPORT
    )
    counts = bigram_counts(RECORDS, SUPPORT, VOCAB)
    found = {
        (int(SUPPORT[i]), int(SUPPORT[j])): int(counts[i, j]) for i, j in counts.nonzero().tolist()
    }
    assert found == dict(want)
    assert len(found) > 10


def test_factors_reproduce_bigram_log_probabilities_at_full_rank() -> None:
    counts = bigram_counts(RECORDS, SUPPORT, VOCAB)
    w1, w2 = bigram_factors(counts, rank=30)
    assert w1.shape == w2.shape == (30, 30)
    got = torch.log_softmax((w1 @ w2.T).double(), -1)
    assert float((got - smoothed(counts)).abs().max()) < 1e-4
    # Rank 3 cannot hold them: the comparison is not vacuous.
    w1, w2 = bigram_factors(counts, rank=3)
    assert float((torch.log_softmax(w1 @ w2.T, -1) - smoothed(counts)).abs().max()) > 0.1


def test_factors_are_the_same_every_time_and_leave_the_global_generator_alone() -> None:
    counts = bigram_counts(RECORDS, SUPPORT, VOCAB)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = bigram_factors(counts, rank=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(bigram_factors(counts, 5), first, strict=True))


def test_a_warm_head_predicts_bigrams_better_than_a_cold_one() -> None:
    draft = tiny_draft()
    clear_spare_rank(draft)
    cold = bigram_cross_entropy(
        draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    )
    warm_start_markov(draft, RECORDS, SUPPORT)
    warm = bigram_cross_entropy(
        draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    )
    assert warm < cold - 0.5
    assert not bool(draft.markov_head.markov_w1.weight[:, -1].any())
    assert not bool(draft.markov_head.markov_w2.weight[:, -1].any())
    # Without a vocabulary all ranks are used.
    free = tiny_draft()
    warm_start_markov(free, RECORDS, None)
    assert bool(free.markov_head.markov_w1.weight[:, -1].any())


@torch.no_grad()
def bigram_cross_entropy(w1: Tensor, w2: Tensor) -> float:
    counts = bigram_counts(RECORDS, SUPPORT, VOCAB)
    log_q = torch.log_softmax(w1[SUPPORT] @ w2[SUPPORT].T, -1)
    return float(-(log_q * counts).sum() / counts.sum())


@torch.no_grad()
def test_a_folded_draft_gives_exactly_zero_outside_and_the_same_odds_inside() -> None:
    draft = tiny_draft()
    clear_spare_rank(draft)
    h = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    previous = torch.tensor([0, 3, 95, 96, 50])

    def logits() -> Tensor:
        m, _ = draft.markov_head.block(previous.view(1, -1), h.view(1, 5, -1))
        out: Tensor = (h @ TARGET.head_weight().T + draft.markov_head.markov_w2(m))[0]
        return out

    before = logits()
    fold_support(draft, SUPPORT)
    q = torch.softmax(logits(), -1)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[SUPPORT] = False
    assert float(q[:, outside].abs().max()) == 0
    inside = torch.softmax(before[:, SUPPORT], -1)
    assert torch.allclose(q[:, SUPPORT], inside, atol=1e-6)
    assert float(torch.softmax(before, -1)[:, outside].sum(-1).max()) > 0.5


@torch.no_grad()
def test_the_fold_leaves_confidence_alone() -> None:
    draft = tiny_draft()
    clear_spare_rank(draft)
    h = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    previous = torch.tensor([[1, 40, 77, 96]])

    def confidence() -> Tensor:
        out: Tensor = draft.confidence_head(h, draft.markov_head.block(previous, h)[1])
        return out

    before = confidence()
    fold_support(draft, SUPPORT)
    assert torch.equal(confidence(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_support_can_be_read_back(dtype: torch.dtype) -> None:
    draft = tiny_draft()
    assert read_support(draft) is None
    clear_spare_rank(draft)
    assert read_support(draft) is None
    fold_support(draft, SUPPORT)
    found = read_support(draft.to(dtype))
    assert found is not None
    assert found.tolist() == SUPPORT.tolist()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_spare_rank_stays_exactly_zero_while_the_rest_trains(
    tmp_path: Path, decay: float
) -> None:
    draft = tiny_draft(target=TARGET)
    clear_spare_rank(draft)
    before = {n: p.detach().clone() for n, p in draft.named_parameters()}
    section = tiny_section(weight_decay=decay)
    Trainer(draft, target_parts(TARGET).head, RECORDS, section, tmp_path, SUPPORT).run()
    head, gate = draft.markov_head, draft.confidence_head.proj.weight
    for spare in (head.markov_w1.weight[:, -1], head.markov_w2.weight[:, -1], gate[:, -1]):
        assert not bool(spare.any())
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight"):
        assert not torch.equal(dict(draft.named_parameters())[name], before[name])
    # Rows of W2 outside the support never move (weight decay is all that could).
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[SUPPORT] = False
    w2 = "markov_head.markov_w2.weight"
    if decay == 0:
        assert torch.equal(head.markov_w2.weight[outside], before[w2][outside])


def test_an_answer_of_one_token_gives_no_bigram() -> None:
    short = record_of(TARGET, [1, 2, 3, 4], 3, name="short")
    assert float(bigram_counts([short], torch.arange(VOCAB), VOCAB).sum()) == 0
