"""Alone, in a padded batch, packed into one row: the same loss and the same gradient."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    BLOCK,
    DRAFTS,
    gradients,
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_target,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from dspark.model.draft import DSparkDraft
from dspark.model.windows import Windows
from dspark.training.anchors import (
    Blocks,
    attention_mask,
    build_blocks,
    counted_slots,
    eligible,
    pack_blocks,
    visible,
)
from dspark.training.step import Vocabulary, training_step, window_weight

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 5)
ANCHORS = [eligible(r.loss_mask)[:: 1 + i] for i, r in enumerate(RECORDS)]


def loss_and_gradients(
    draft: DSparkDraft, batches: list[Blocks]
) -> tuple[float, dict[str, Tensor]]:
    draft.zero_grad(set_to_none=True)
    denominator, value = window_weight(batches, 4.0), 0.0
    for blocks in batches:
        out = training_step(
            draft,
            blocks,
            Vocabulary.of(TARGET.head_weight(), None, torch.float32),
            coefficients=(0.1, 0.9, 1.0),
            decay=4.0,
            denominator=denominator,
            chunk=16,
        )
        total = torch.stack(list(out.terms.values())).sum()
        total.backward()
        value += float(total.detach())
    return value, gradients(draft)


@pytest.mark.parametrize(("kind", "flavour"), DRAFTS)
def test_alone_in_a_batch_and_packed_are_one_step(kind: str, flavour: str) -> None:
    draft = tiny_draft(kind, flavour)  # type: ignore[arg-type]
    ways = {
        "alone": [build_blocks([r], [a], BLOCK) for r, a in zip(RECORDS, ANCHORS, strict=True)],
        "batch": [build_blocks(RECORDS, ANCHORS, BLOCK)],
        "packed": [pack_blocks(RECORDS, ANCHORS, BLOCK)],
    }
    found = {name: loss_and_gradients(draft, batches) for name, batches in ways.items()}
    want, wanted = found.pop("alone")
    for name, (value, grads) in found.items():
        assert abs(value - want) < 1e-5 * abs(want), name
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted[key], rtol=2e-4, atol=2e-6, msg=f"{name} {key}")


def test_a_packed_row_is_cut_behind_each_document_s_last_block() -> None:
    anchors = [eligible(r.loss_mask)[:1] for r in RECORDS]
    blocks = pack_blocks(RECORDS, anchors, BLOCK)
    needed = [min(len(r), int(a[0]) + BLOCK + 1) for r, a in zip(RECORDS, anchors, strict=True)]
    assert blocks.ids.shape[1] == sum(needed) < sum(len(r) for r in RECORDS)
    with_none = pack_blocks(RECORDS[:2], [anchors[0], anchors[1][:0]], BLOCK)
    assert with_none.ids.shape[1] == needed[0]


def test_no_block_sees_another_document() -> None:
    blocks = pack_blocks(RECORDS, ANCHORS, BLOCK)
    size, count = blocks.ids.shape[1], blocks.anchors.shape[1]
    assert isinstance(blocks.attention, Windows)
    seen = blocks.attention.whole()[0, 0].view(count, BLOCK, -1)[..., :size]
    for row, (anchor, first) in enumerate(zip(blocks.anchors[0], blocks.first[0], strict=True)):
        expected = torch.zeros(size, dtype=torch.bool)
        expected[first:anchor] = True
        assert torch.equal(seen[row], expected.expand(BLOCK, -1))


def test_slots_are_counted_as_the_blocks_count_them() -> None:
    for record, anchors in zip(RECORDS, ANCHORS, strict=True):
        blocks = build_blocks([record], [anchors], BLOCK)
        assert torch.equal(counted_slots(record.loss_mask, anchors, BLOCK), blocks.slot_mask[0])


def test_flex_attention_s_mask_is_made_of_the_same_predicate() -> None:
    """CUDA's kernel asks the predicate per pair of indices, the CPU's gets it as a dense mask."""
    blocks = pack_blocks(RECORDS, ANCHORS, BLOCK)
    size, count = blocks.ids.shape[1], blocks.anchors.shape[1]
    anchors, first = blocks.anchors[0], blocks.first[0]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = q // BLOCK
        key_block = torch.where(k < size, -1, (k - size) // BLOCK)
        return visible(anchors[block], block, k, key_block, first[block])

    rows = count * BLOCK
    made = create_mask(mask_mod, 1, 1, rows, size + rows, device="cpu")
    dense = attention_mask(blocks.anchors, torch.tensor([size]), size, BLOCK, blocks.first)
    assert torch.equal(made, dense)
    assert 0 < int(made.sum()) < made.numel()
