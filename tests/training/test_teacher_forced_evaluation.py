"""The numbers of ``training.json`` against their definitions."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BLOCK, VOCAB, tiny_draft, tiny_records, tiny_target

from dspark.training.anchors import Blocks, build_blocks, eligible
from dspark.training.evaluate import Evaluator, block_tau
from dspark.training.loss import slot_weights
from dspark.training.step import StepOutput, Vocabulary, training_step

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 4)


def test_tau_is_one_plus_the_sum_of_running_products() -> None:
    accept = torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.8, 0.9, 0.9]])
    mask = torch.ones(4, 3)
    mask[3, 1:] = 0
    assert block_tau(accept, mask).tolist() == pytest.approx([2.0, 4.0, 1.0, 1.8])


def run(
    numbers: list[int], support: torch.Tensor | None = None
) -> tuple[Blocks, StepOutput, list[str]]:
    records = [RECORDS[i] for i in numbers]
    blocks = build_blocks(records, [eligible(r.loss_mask) for r in records], BLOCK)
    with torch.no_grad():
        out = training_step(
            tiny_draft(),
            blocks,
            Vocabulary.of(TARGET.head_weight(), support, torch.float32),
            coefficients=(0.1, 0.9, 1.0),
            decay=4.0,
            denominator=1.0,
            chunk=64,
        )
    return blocks, out, [r.category for r in records]


def test_summary_equals_the_definitions_over_all_batches() -> None:
    evaluator = Evaluator(BLOCK)
    accept: list[list[float]] = [[] for _ in range(BLOCK)]
    agree: list[list[float]] = [[] for _ in range(BLOCK)]
    taus: dict[str, list[float]] = {}
    full: list[float] = []
    for numbers in ([0, 1], [2], [3]):
        blocks, out, categories = run(numbers)
        evaluator.add(blocks, out, categories)
        rows = iter(zip(out.stats.acceptance.tolist(), out.stats.agree.tolist(), strict=True))
        for b, category in enumerate(categories):
            for counted in blocks.slot_mask[b].tolist():
                if not any(counted):
                    continue
                product, tau = 1.0, 1.0
                for k in range(sum(counted)):
                    a, g = next(rows)
                    accept[k].append(a)
                    agree[k].append(g)
                    product *= a
                    tau += product
                taus.setdefault(category, []).append(tau)
                full += [tau] if all(counted) else []
    got = evaluator.summary()
    every = [t for values in taus.values() for t in values]
    assert got["accept_rate"] == pytest.approx([sum(v) / len(v) for v in accept], rel=1e-5)
    assert got["greedy_agreement"] == pytest.approx([sum(v) / len(v) for v in agree], rel=1e-5)
    assert got["tau_all"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    assert got["tau_full"] == pytest.approx(sum(full) / len(full), rel=1e-5)
    assert 0 < len(full) < len(every)
    assert got["by_category"] == pytest.approx(
        {c: sum(v) / len(v) for c, v in taus.items()}, rel=1e-5
    )
    assert len(got["by_category"]) == 2


def test_confidence_bias_and_error_are_signed_and_unsigned() -> None:
    blocks, out, categories = run([0, 1])
    evaluator = Evaluator(BLOCK)
    evaluator.add(blocks, out, categories)
    error = torch.sigmoid(out.confidence) - out.stats.acceptance
    got = evaluator.summary()
    assert got["confidence_bias"] == pytest.approx(float(error.mean()), rel=1e-4)
    assert got["confidence_abs_error"] == pytest.approx(float(error.abs().mean()), rel=1e-4)
    assert got["l1"] == pytest.approx(float(out.stats.l1.mean()), rel=1e-5)


def test_evaluation_weights_no_slot() -> None:
    """Slot weights shape the gradient, not the figures that are reported."""
    assert slot_weights(BLOCK, 4.0)[-1] < 0.5
    blocks, out, _ = run([0])
    assert len(out.stats.l1) == int(blocks.slot_mask.sum())


def test_cross_entropy_is_over_labels_the_draft_can_propose() -> None:
    evaluator = Evaluator(BLOCK)
    ce: list[float] = []
    lost = 0
    for numbers in ([0, 1], [2]):
        blocks, out, categories = run(numbers, torch.arange(1, VOCAB, 2))
        evaluator.add(blocks, out, categories)
        labels = blocks.labels[blocks.slot_mask]
        ce += out.stats.ce[labels % 2 == 1].tolist()
        lost += int((labels % 2 == 0).sum())
    got = evaluator.summary()
    assert lost > 0
    assert got["ce"] == pytest.approx(sum(ce) / len(ce), rel=1e-5)
    assert got["outside"] == pytest.approx(lost / (lost + len(ce)), rel=1e-5)
    blocks, out, categories = run([0])
    whole = Evaluator(BLOCK)
    whole.add(blocks, out, categories)
    assert whole.summary()["outside"] == 0
