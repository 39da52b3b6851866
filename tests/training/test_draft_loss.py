"""The fused, chunked loss against the contract written out in float64 with whole logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import one_thread  # noqa: F401 (autouse)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.training.loss import LossInputs, RowStats, draft_loss, slot_weights

COEFFICIENTS = (0.1, 0.9, 1.0)
PARTS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), COEFFICIENTS)


@dataclass
class Case:
    """Supervised rows over the whole vocabulary; ``support`` None means all of it."""

    h: Tensor
    m: Tensor
    w2: Tensor
    head: Tensor
    t: Tensor
    labels: Tensor
    weight: Tensor
    confidence: Tensor
    support: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [self.h, self.m, self.w2, self.confidence]


def make_case(
    seed: int,
    support: int | None,
    rows: int = 23,
    vocab: int = 41,
    dtype: torch.dtype = torch.float64,
) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, rank = 12, 5
    kept = None if support is None else torch.randperm(vocab, generator=g)[:support].sort().values
    return Case(
        h=normal(rows, hidden),
        m=normal(rows, rank),
        w2=normal(vocab, rank),
        head=normal(vocab, hidden),
        t=normal(rows, hidden),
        labels=torch.randint(vocab, (rows,), generator=g),
        weight=slot_weights(4, 4.0)[torch.arange(rows) % 4].to(dtype),
        confidence=normal(rows),
        support=kept,
    )


def reference(
    case: Case, coefficients: tuple[float, float, float], denominator: float
) -> tuple[Tensor, RowStats]:
    """The contract's formula on whole logits; outside the support the draft's are -inf."""
    logits = case.h @ case.head.T + case.m @ case.w2.T
    inside = torch.ones(len(case.head), dtype=torch.bool)
    if case.support is not None:
        inside.fill_(False)[case.support] = True
        logits = logits.masked_fill(~inside, -math.inf)
    q, p = torch.softmax(logits, -1), torch.softmax(case.t @ case.head.T, -1)
    l1 = (q - p).abs().sum(-1)
    # A text token the draft cannot say has no cross entropy to minimise.
    rows = inside[case.labels]
    log_q = torch.log_softmax(logits, -1)[torch.arange(len(rows)), case.labels]
    ce = torch.where(rows, -torch.where(rows, log_q, 0.0), 0.0)
    accepted = (1 - l1 / 2).clamp(0, 1).detach()
    bce = F.binary_cross_entropy_with_logits(case.confidence, accepted, reduction="none")
    each = coefficients[0] * ce + coefficients[1] * l1 + coefficients[2] * bce
    return (each * case.weight).sum() / denominator, RowStats(ce, l1, accepted, rows.to(ce.dtype))


def fused(
    case: Case,
    coefficients: tuple[float, float, float],
    denominator: float,
    chunk: int = 8,
    source: Tensor | None = None,
) -> tuple[Tensor, RowStats]:
    head, w2, log_z, labels = case.head, case.w2, None, case.labels
    if case.support is not None:
        index = torch.full((len(head),), -1)
        index[case.support] = torch.arange(len(case.support))
        log_z = torch.logsumexp(case.t @ head.T, -1)
        head, w2, labels = head[case.support], w2[case.support], index[labels]
    rows = LossInputs(case.h, case.m, case.t, log_z, labels, case.weight, case.confidence, source)
    terms, stats = draft_loss(
        rows, head, w2, coefficients=coefficients, denominator=denominator, chunk=chunk
    )
    return terms["draft"] + terms["confidence"], stats


def differentiate(loss: Any, case: Case, *arguments: Any) -> tuple[Tensor, list[Tensor], RowStats]:
    leaves = [leaf.requires_grad_(True) for leaf in case.leaves()]
    value, stats = loss(case, *arguments)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return (
        value.detach(),
        [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)],
        stats,
    )


@pytest.mark.parametrize("coefficients", PARTS)
@pytest.mark.parametrize("support", [None, 17, 40])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_equal_whole_logits_in_float64(
    seed: int, support: int | None, coefficients: tuple[float, float, float]
) -> None:
    case = make_case(seed, support)
    want, want_grads, want_stats = differentiate(reference, case, coefficients, 3.7)
    got, got_grads, got_stats = differentiate(fused, case, coefficients, 3.7)
    # Confidence terms are fp32 by design; the fused rest follows its inputs' precision.
    tolerance = 1e-12 if coefficients[2] == 0 else 1e-6
    assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)
    for name, a, b in zip(("h", "m", "w2", "confidence"), got_grads, want_grads, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), name
    assert torch.allclose(got_stats.l1, want_stats.l1, atol=1e-12)
    assert torch.allclose(got_stats.ce, want_stats.ce, atol=1e-12)
    if coefficients[0] or coefficients[1]:
        assert all(float(g.abs().max()) > 1e-3 for g in want_grads[:3])


def test_in_fp32_the_gradients_stay_within_rounding_of_float64() -> None:
    case = make_case(3, 17)
    _, want, _ = differentiate(reference, case, COEFFICIENTS, 3.7)
    _, got, _ = differentiate(fused, make_case(3, 17, dtype=torch.float32), COEFFICIENTS, 3.7)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).abs().max()) < 2e-6 * max(1.0, float(b.abs().max()))


def test_l1_counts_the_target_mass_outside_the_support() -> None:
    case = make_case(5, 9)
    assert case.support is not None
    p = torch.softmax(case.t @ case.head.T, -1)
    outside = 1 - p[:, case.support].sum(-1)
    assert float(outside.min()) > 0.05
    _, stats = fused(case, COEFFICIENTS, 1.0)
    # |q - p| sums to at least twice what q cannot reach, and acceptance is capped by the rest.
    assert bool((stats.l1 >= 2 * outside - 1e-12).all())
    assert bool((stats.acceptance <= 1 - outside + 1e-12).all())


def test_labels_outside_the_support_add_no_cross_entropy_and_no_gradient() -> None:
    case = make_case(6, 9)
    assert case.support is not None
    lost = ~torch.isin(case.labels, case.support)
    assert 0 < int(lost.sum()) < len(lost)
    _, (grad_h, *_), stats = differentiate(fused, case, (1.0, 0.0, 0.0), 1.0)
    assert float(stats.ce[lost].abs().max()) == 0
    assert torch.equal(stats.inside == 0, lost)
    assert float(grad_h[lost].abs().max()) == 0
    assert float(grad_h[~lost].abs().amin(-1).max()) > 0


@pytest.mark.parametrize("support", [None, 17])
def test_chunk_size_does_not_matter(support: int | None) -> None:
    case = make_case(7, support)
    whole, grads, stats = differentiate(fused, case, COEFFICIENTS, 2.0, 10_000)
    for chunk in (1, 5, 22, 23):
        value, others, other_stats = differentiate(fused, case, COEFFICIENTS, 2.0, chunk)
        assert torch.allclose(value, whole, rtol=1e-12)
        for a, b in zip(others, grads, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert torch.allclose(other_stats.l1, stats.l1, rtol=1e-12)
        assert torch.equal(other_stats.agree, stats.agree)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor any operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_tensor_of_rows_by_vocabulary_is_made_or_saved() -> None:
    rows, vocab, chunk = 400, 3000, 8
    case = make_case(8, None, rows=rows, vocab=vocab, dtype=torch.float32)
    for leaf in case.leaves():
        leaf.requires_grad_(True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    biggest = max(case.head.numel(), case.w2.numel(), chunk * vocab)
    assert biggest * 4 < rows * vocab
    with LargestTensor() as made:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = fused(case, COEFFICIENTS, 1.0, chunk)
        loss.backward()
    assert max(saved) <= max(case.h.numel(), case.m.numel(), case.w2.numel())
    assert made.elements <= biggest
    with LargestTensor() as made:  # a single chunk is what the loss must not do
        fused(case, COEFFICIENTS, 1.0, rows)
    assert made.elements == rows * vocab


def test_a_chunk_bounds_memory_at_the_vocabulary_of_kimi_k3() -> None:
    rows, vocab, chunk = 32, 163_840, 4
    case = make_case(9, None, rows=rows, vocab=vocab, dtype=torch.float32)
    with LargestTensor() as made:
        value, _, stats = differentiate(fused, case, COEFFICIENTS, 3.0, chunk)
    assert made.elements <= max(case.head.numel(), chunk * vocab)
    wanted, reference_stats = reference(case, COEFFICIENTS, 3.0)
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats.l1, reference_stats.l1.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("support", [None, 17])
@pytest.mark.parametrize("chunk", [5, 100])
def test_rows_of_one_target_position_share_their_work_and_nothing_else(
    support: int | None, chunk: int
) -> None:
    case = make_case(10, support)
    source = torch.arange(len(case.t)) // 3
    case = replace(case, t=case.t[source])
    want, grads, stats = differentiate(fused, case, COEFFICIENTS, 2.0, chunk)

    def shared(case: Case, *arguments: Any) -> tuple[Tensor, RowStats]:
        return fused(case, *arguments, source=source)

    got, others, other_stats = differentiate(shared, case, COEFFICIENTS, 2.0, chunk)
    assert torch.allclose(got, want, rtol=1e-12)
    for a, b in zip(others, grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert torch.allclose(other_stats.l1, stats.l1, rtol=1e-12)
    assert torch.equal(other_stats.agree, stats.agree)
    # It is what saves the work: a wrong number would be believed.
    wrong = replace(case, t=case.t + torch.arange(len(case.t)).unsqueeze(-1) * 0.1)
    assert not torch.allclose(
        shared(wrong, COEFFICIENTS, 2.0, chunk)[0], fused(wrong, COEFFICIENTS, 2.0, chunk)[0]
    )


def test_slot_weights_decay_from_one() -> None:
    weights = slot_weights(7, 4.0)
    assert weights[0] == 1  # a zero here trains everything but the first token
    assert weights.tolist() == pytest.approx([math.exp(-k / 4.0) for k in range(7)])
    assert slot_weights(7, 7.0)[6] == pytest.approx(math.exp(-6 / 7))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.floats(0.01, 60),
    st.sampled_from([None, 1, 3, 11]),
)
def test_l1_and_acceptance_stay_in_their_ranges(
    seed: int, scale: float, support: int | None
) -> None:
    case = make_case(seed, support, rows=6, vocab=11)
    case = replace(case, h=case.h * scale, t=case.t * scale)
    _, stats = fused(case, COEFFICIENTS, 1.0)
    assert bool(((stats.l1 >= 0) & (stats.l1 <= 2 + 1e-9)).all())
    assert bool(((stats.acceptance >= 0) & (stats.acceptance <= 1)).all())


def test_l1_is_0_for_the_target_itself_and_2_for_disjoint_distributions() -> None:
    """Not halved: the halved form is another paper's ``tv``."""
    case = make_case(9, None)
    same = replace(case, h=case.t, m=torch.zeros_like(case.m))
    _, stats = fused(same, COEFFICIENTS, 1.0)
    assert float(stats.l1.max()) < 1e-12
    assert bool(stats.agree.all())
    assert float(stats.acceptance.min()) > 1 - 1e-12
    opposite = replace(same, h=-80 * case.t, t=80 * case.t)
    _, stats = fused(opposite, COEFFICIENTS, 1.0)
    assert float(stats.l1.min()) > 2 - 1e-6
    assert not bool(stats.agree.any())


def test_the_confidence_label_is_detached_and_its_inputs_are_not() -> None:
    case = make_case(10, None)
    _, (h, m, w2, confidence), stats = differentiate(fused, case, (0.0, 0.0, 1.0), 2.5)
    # c* depends on h, m and W2, yet no gradient comes back through it ...
    for gradient in (h, m, w2):
        assert float(gradient.abs().max()) == 0
    # ... while the logit itself gets the whole of (sigmoid(c) - c*) w / sum(w).
    want = (torch.sigmoid(case.confidence) - stats.acceptance) * case.weight / 2.5
    assert torch.allclose(confidence, want.detach(), atol=1e-6)
    assert float(confidence.abs().min()) > 0
