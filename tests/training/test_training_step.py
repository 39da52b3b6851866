"""One step of the training layout: exact normalisation, exact zeros, and the contract in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import (
    BLOCK,
    DRAFTS,
    VOCAB,
    gradients,
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_target,
)
from torch import Tensor

from dspark.config.architecture import Flavour, MarkovHeadType
from dspark.model.draft import DSparkDraft
from dspark.training.anchors import Blocks, attention_windows, build_blocks, eligible
from dspark.training.step import StepOutput, Vocabulary, block_states, training_step, window_weight

COEFFICIENTS = (0.1, 0.9, 1.0)
DECAY = 4.0
TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 5)
WHOLE = Vocabulary.of(TARGET.head_weight(), None, torch.float32)
SUPPORT = torch.arange(0, VOCAB, 2)


def anchors_of(number: int, count: int) -> Tensor:
    """Spread over the answer, the last eligible one (a short block) included."""
    candidates = eligible(RECORDS[number].loss_mask)
    spread = torch.linspace(0, len(candidates) - 1, count).round().long()
    return candidates[sorted(set(spread.tolist()))]


def blocks_of(numbers: Sequence[int], counts: Sequence[int]) -> Blocks:
    return build_blocks(
        [RECORDS[i] for i in numbers],
        [anchors_of(i, n) for i, n in zip(numbers, counts, strict=True)],
        BLOCK,
    )


def step(
    draft: DSparkDraft,
    blocks: Blocks,
    denominator: float = 10.0,
    vocabulary: Vocabulary = WHOLE,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    *,
    detach: bool = False,
) -> StepOutput:
    out = training_step(
        draft,
        blocks,
        vocabulary,
        coefficients=coefficients,
        decay=DECAY,
        denominator=denominator,
        chunk=7,
        detach_confidence=detach,
    )
    loss = out.terms["draft"] + out.terms["confidence"]
    loss.backward()
    return out


def gradients_of(
    kind: MarkovHeadType, flavour: Flavour, batches: Sequence[Blocks], denominator: float
) -> dict[str, Tensor]:
    draft = tiny_draft(kind, flavour)
    for blocks in batches:
        step(draft, blocks, denominator)
    return gradients(draft)


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    scale = max(float(g.abs().max()) for g in b.values())
    return max(float((a[n] - b[n]).abs().max()) for n in b) / scale


@pytest.mark.parametrize("support", [None, SUPPORT])
@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_loss_equals_the_contract_slot_by_slot(
    kind: MarkovHeadType, flavour: Flavour, support: Tensor | None
) -> None:
    draft, blocks = tiny_draft(kind, flavour), blocks_of([0, 1, 2], [3, 1, 4])
    vocabulary = Vocabulary.of(TARGET.head_weight(), support, torch.float32)
    out = step(draft, blocks, 7.5, vocabulary)
    with torch.no_grad():
        h = block_states(draft, blocks)
        m, e = draft.markov_head.block(blocks.previous, h)
        logits = (h @ TARGET.head_weight().T + draft.markov_head.markov_w2(m)).double()
        confidence = draft.confidence_head(h, e).double()
    total = {"draft": 0.0, "confidence": 0.0}
    for b, number in enumerate([0, 1, 2]):
        record = RECORDS[number]
        for a, anchor in enumerate(anchors_of(number, [3, 1, 4][b]).tolist()):
            for k in range(min(BLOCK, len(record) - 1 - anchor)):
                p = torch.softmax(
                    record.final[anchor + k].double() @ TARGET.head_weight().double().T, -1
                )
                row = logits[b, a, k]
                label = int(record.ids[anchor + k + 1])
                if support is not None:
                    outside = torch.ones(VOCAB, dtype=torch.bool)
                    outside[support] = False
                    row = row.masked_fill(outside, -math.inf)
                log_q = torch.log_softmax(row, -1)
                l1 = float((log_q.exp() - p).abs().sum())
                ce = -float(log_q[label]) if math.isfinite(float(log_q[label])) else 0.0
                accepted = torch.tensor(min(1.0, max(0.0, 1 - l1 / 2)), dtype=torch.float64)
                bce = F.binary_cross_entropy_with_logits(confidence[b, a, k], accepted)
                weight = math.exp(-k / DECAY) / 7.5
                total["draft"] += weight * (0.1 * ce + 0.9 * l1)
                total["confidence"] += weight * float(bce)
    assert {n: float(t.detach()) for n, t in out.terms.items()} == pytest.approx(total, rel=1e-5)


def test_greedy_agreement_is_about_the_targets_own_choice_not_the_best_of_the_support() -> None:
    draft, blocks = tiny_draft(), blocks_of([0, 1, 2, 3, 4], [6] * 5)
    odd = torch.arange(1, VOCAB, 2)
    out = step(draft, blocks, 1.0, Vocabulary.of(TARGET.head_weight(), odd, torch.float32))
    rows = torch.arange(5).view(-1, 1, 1).expand_as(blocks.slot_mask)[blocks.slot_mask]
    choice = blocks.greedy[rows, blocks.source[blocks.slot_mask]]
    lost = choice % 2 == 0
    assert 0 < int(lost.sum()) < len(lost)
    assert float(out.stats.agree[lost].sum()) == 0


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_accumulating_single_records_equals_one_batch_of_them(
    kind: MarkovHeadType, flavour: Flavour
) -> None:
    numbers, counts = [0, 1, 2, 3], [1, 6, 2, 4]
    alone = [blocks_of([i], [n]) for i, n in zip(numbers, counts, strict=True)]
    together = [blocks_of(numbers, counts)]
    weight = window_weight(alone, DECAY)
    assert window_weight(together, DECAY) == pytest.approx(weight, rel=1e-12)
    want = gradients_of(kind, flavour, together, weight)
    assert farthest(gradients_of(kind, flavour, alone, weight), want) < 2e-6
    # Normalising every micro-batch by its own weight is another objective, by far.
    other = tiny_draft(kind, flavour)
    for blocks in alone:
        step(other, blocks, window_weight([blocks], DECAY) * len(alone))
    assert farthest(gradients(other), want) > 1e-2


def test_window_weight_is_the_sum_of_weights_of_counted_slots() -> None:
    blocks = blocks_of([0, 1], [3, 2])
    want = sum(
        math.exp(-k / DECAY) for counted in blocks.slot_mask.flatten(0, 1).tolist()
        for k, yes in enumerate(counted) if yes
    )  # fmt: skip
    assert window_weight([blocks], DECAY) == pytest.approx(want, rel=1e-6)
    assert window_weight([blocks, blocks], DECAY) == pytest.approx(2 * want, rel=1e-6)


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_a_record_alone_gives_the_rows_it_gives_in_a_batch(
    kind: MarkovHeadType, flavour: Flavour
) -> None:
    numbers, counts = [0, 1, 2, 3], [2, 6, 3, 1]
    draft = tiny_draft(kind, flavour)
    blocks = blocks_of(numbers, counts)
    together = step(draft, blocks)
    owner = torch.arange(4).view(-1, 1, 1).expand_as(blocks.slot_mask)[blocks.slot_mask]
    for row, (number, count) in enumerate(zip(numbers, counts, strict=True)):
        alone = step(draft, blocks_of([number], [count]))
        mine = owner == row
        assert torch.equal(alone.slots, together.slots[mine])
        for a, b in (
            (alone.stats.ce, together.stats.ce),
            (alone.stats.l1, together.stats.l1),
            (alone.confidence, together.confidence),
        ):
            assert torch.allclose(a, b[mine], rtol=1e-5, atol=1e-5)


def with_dropped(blocks: Blocks, row: int, block: int) -> Blocks:
    mask = blocks.slot_mask.clone()
    mask[row, block] = False
    return replace(blocks, slot_mask=mask)


def scrambled(blocks: Blocks, lengths: list[int]) -> Blocks:
    """Other content wherever nothing may count: dropped blocks, padding anchors, padded tokens."""
    dead = ~blocks.slot_mask
    anchors = blocks.anchors.clone()
    anchors[~blocks.slot_mask.any(-1)] = 2
    padded = torch.arange(blocks.ids.shape[1]) >= torch.tensor(lengths).unsqueeze(-1)
    taps, final, log_z = blocks.taps.clone(), blocks.final.clone(), blocks.log_z.clone()
    taps[padded], final[padded], log_z[padded] = 7.0, -3.0, 9.0
    return replace(
        blocks,
        anchors=anchors,
        taps=taps,
        final=final,
        log_z=log_z,
        ids=blocks.ids.masked_fill(padded, 11),
        labels=blocks.labels.masked_fill(dead, 5),
        previous=blocks.previous.masked_fill(dead, 6),
        source=blocks.source.masked_fill(dead, 0),
        attention=attention_windows(
            anchors, torch.tensor(lengths), blocks.ids.shape[1], blocks.labels.shape[-1]
        ),
    )


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_dropped_blocks_and_padding_get_exactly_zero_gradient(
    kind: MarkovHeadType, flavour: Flavour
) -> None:
    numbers, counts = [0, 1], [2, 6]
    lengths = [len(RECORDS[i]) for i in numbers]
    blocks = with_dropped(blocks_of(numbers, counts), 1, 2)
    assert lengths[0] != lengths[1]
    assert int((~blocks.slot_mask.any(-1)).sum()) >= 2  # one dropped block, some padding anchors
    want = gradients_of(kind, flavour, [blocks], 10.0)
    got = gradients_of(kind, flavour, [scrambled(blocks, lengths)], 10.0)
    assert all(torch.equal(got[name], want[name]) for name in want)
    # The same scrambling of a block that counts does move gradients.
    counted = blocks_of(numbers, counts)
    moved = replace(counted, labels=scrambled(blocks, lengths).labels)
    base = gradients_of(kind, flavour, [counted], 10.0)
    assert farthest(gradients_of(kind, flavour, [moved], 10.0), base) > 1e-4


def test_a_dropped_block_is_as_good_as_never_chosen() -> None:
    chosen = anchors_of(1, 4)
    with_it = with_dropped(build_blocks([RECORDS[1]], [chosen], BLOCK), 0, 1)
    without = build_blocks([RECORDS[1]], [chosen[[0, 2, 3]]], BLOCK)
    want = gradients_of("vanilla", "qwen3", [without], 5.0)
    assert farthest(gradients_of("vanilla", "qwen3", [with_it], 5.0), want) < 5e-6


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_states_nobody_may_see_get_exactly_zero_gradient(
    kind: MarkovHeadType, flavour: Flavour
) -> None:
    """Padded positions, and everything at or behind the last anchor that counts."""
    numbers = [0, 1]
    blocks = blocks_of(numbers, [3, 2])
    # The last anchors do not count: what only they could see must stay untouched too.
    blocks = with_dropped(with_dropped(blocks, 0, 2), 1, 1)
    taps = blocks.taps.clone().requires_grad_(True)
    step(tiny_draft(kind, flavour), replace(blocks, taps=taps))
    assert taps.grad is not None
    for row, number in enumerate(numbers):
        counted = blocks.anchors[row][blocks.slot_mask[row].any(-1)]
        last = int(counted.max())
        assert last < len(RECORDS[number]) - 2
        assert float(taps.grad[row, last:].abs().max()) == 0
        assert float(taps.grad[row, :last].abs().amin(dim=(-1, -2)).min()) > 0


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_every_trainable_parameter_learns_and_the_embedding_stays_frozen(
    kind: MarkovHeadType, flavour: Flavour
) -> None:
    draft = tiny_draft(kind, flavour, target=TARGET)
    step(draft, blocks_of([0, 1, 2], [4, 4, 4]))
    for name, gradient in gradients(draft).items():
        assert float(gradient.abs().max()) > 0, name
    assert draft.embed_tokens.weight.grad is None
    frozen = [n for n, p in draft.named_parameters() if not p.requires_grad]
    assert frozen == ["embed_tokens.weight"]
    assert torch.equal(draft.embed_tokens.weight, TARGET.embedding_weight())


@pytest.mark.parametrize("detach", [False, True])
def test_the_confidence_term_reaches_the_backbone_unless_detached(detach: bool) -> None:
    draft = tiny_draft()
    step(draft, blocks_of([0, 1], [3, 3]), coefficients=(0.0, 0.0, 1.0), detach=detach)
    moved = {
        name
        for name, parameter in draft.named_parameters()
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 0
    }
    own = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    if detach:
        assert moved == own
    else:
        assert own < moved
        assert {"context_proj.weight", "markov_head.markov_w1.weight"} <= moved
    assert "markov_head.markov_w2.weight" not in moved  # only c*, which is a label, depends on it


def test_bf16_autocast_keeps_the_loss_in_fp32_and_near() -> None:
    draft, blocks = tiny_draft(), blocks_of([0, 1, 2], [4, 4, 4])
    exact = step(draft, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = step(draft, blocks)
    assert rounded.stats.l1.dtype == torch.float32
    assert rounded.terms["draft"].dtype == torch.float32
    assert float((rounded.stats.l1 - exact.stats.l1).abs().mean()) < 0.05
    assert not torch.equal(rounded.stats.l1, exact.stats.l1)
