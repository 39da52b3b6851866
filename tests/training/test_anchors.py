"""Anchors, slots and who sees whom, against loops that spell the contract out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BLOCK, MASK_ID, tiny_draft, tiny_records, tiny_target
from torch import Tensor

from dspark.hidden.record import HiddenRecord
from dspark.model.windows import Windows
from dspark.training.anchors import Blocks, attention_mask, build_blocks, eligible, sample_anchors
from dspark.training.step import block_states

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def bare_record(mask: list[int], seed: int = 0) -> HiddenRecord:
    """Random content under any loss mask, also ones with gaps (several turns)."""
    n, g = len(mask), torch.Generator().manual_seed(seed)
    return HiddenRecord(
        id="bare",
        category="x",
        temperature=0.0,
        layer_ids=(0, 2),
        norm_state="post",
        ids=torch.randint(0, 90, (n,), generator=g, dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        taps=torch.randn(n, 2, 32, generator=g),
        final=torch.randn(n, 32, generator=g),
        greedy=torch.randint(0, 90, (n,), generator=g, dtype=torch.int32),
        log_z=torch.randn(n, generator=g),
    )


@given(MASKS)
def test_an_anchor_is_eligible_when_it_and_its_successor_are_supervised(mask: list[int]) -> None:
    want = [a for a in range(len(mask) - 1) if mask[a] == 1 and mask[a + 1] == 1]
    assert eligible(torch.tensor(mask, dtype=torch.uint8)).tolist() == want


@given(MASKS, st.integers(1, 30), st.integers(0, 1000))
def test_at_most_num_anchors_distinct_eligible_ascending(
    mask: list[int], count: int, seed: int
) -> None:
    loss_mask = torch.tensor(mask, dtype=torch.uint8)
    possible = eligible(loss_mask).tolist()
    chosen = sample_anchors(loss_mask, count, torch.Generator().manual_seed(seed)).tolist()
    assert len(chosen) == min(count, len(possible))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(possible)


def test_anchors_are_uniform_without_replacement() -> None:
    loss_mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    generator = torch.Generator().manual_seed(11)
    draws = 4500
    seen = Counter(tuple(sample_anchors(loss_mask, 2, generator).tolist()) for _ in range(draws))
    pairs = list(combinations(eligible(loss_mask).tolist(), 2))
    assert len(pairs) == 15
    assert set(seen) == set(pairs)
    expected = draws / len(pairs)
    chi_square = sum((seen[pair] - expected) ** 2 / expected for pair in pairs)
    assert chi_square < 36.1  # 14 degrees of freedom, p = 0.001


def slots_by_loop(record: HiddenRecord, anchor: int) -> list[tuple[int, int, int]]:
    """(label, previous, source) of every slot that counts."""
    out = []
    for k in range(BLOCK):
        label = anchor + k + 1
        if label >= len(record) or record.loss_mask[label] == 0:
            break
        out.append((int(record.ids[label]), int(record.ids[anchor + k]), anchor + k))
    return out


@settings(deadline=None)
@given(st.lists(MASKS, min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 99))
def test_slots_are_contiguous_and_carry_the_right_tokens(
    masks: list[list[int]], count: int, seed: int
) -> None:
    records = [bare_record(mask, seed + i) for i, mask in enumerate(masks)]
    generator = torch.Generator().manual_seed(seed)
    anchors = [sample_anchors(r.loss_mask, count, generator) for r in records]
    blocks = build_blocks(records, anchors, BLOCK)
    assert blocks.keep.sum() == sum(len(a) for a in anchors)
    for b, (record, chosen) in enumerate(zip(records, anchors, strict=True)):
        for a in range(blocks.keep.shape[1]):
            counted = blocks.slot_mask[b, a]
            if a >= len(chosen):
                assert not bool(counted.any())
                continue
            want = slots_by_loop(record, int(chosen[a]))
            assert counted.tolist() == [k < len(want) for k in range(BLOCK)]
            rows = (blocks.labels[b, a], blocks.previous[b, a], blocks.source[b, a])
            assert list(zip(*(r[counted].tolist() for r in rows), strict=True)) == want
            assert bool(counted[0])  # an eligible anchor always has something to predict


def visible_by_loop(anchors: Tensor, lengths: Tensor, size: int, b: int, q: int, key: int) -> bool:
    block = q // BLOCK
    if key < size:
        return key < int(anchors[b, block]) and key < int(lengths[b])
    return (key - size) // BLOCK == block


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 10_000))
def test_the_mask_equals_the_contract_in_loops(
    batch: int, count: int, size: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, size, (batch, count), generator=g)
    lengths = torch.randint(1, size + 1, (batch,), generator=g)
    mask = attention_mask(anchors, lengths, size, BLOCK)
    assert mask.shape == (batch, 1, count * BLOCK, size + count * BLOCK)
    for b in range(batch):
        for q in range(count * BLOCK):
            want = [
                visible_by_loop(anchors, lengths, size, b, q, key)
                for key in range(size + count * BLOCK)
            ]
            assert mask[b, 0, q].tolist() == want


@pytest.fixture(scope="module")
def two_blocks() -> Blocks:
    record = tiny_records(tiny_target(), 1)[0]
    start = int(record.loss_mask.nonzero()[0])
    return build_blocks([record], [torch.tensor([start + 1, start + 4])], BLOCK)


def changed(before: Tensor, after: Tensor) -> list[bool]:
    """Per block, whether any state moved at all."""
    return [not torch.equal(before[0, a], after[0, a]) for a in range(before.shape[1])]


@torch.no_grad()
def test_blocks_never_see_each_other(two_blocks: Blocks) -> None:
    draft, (first, second) = tiny_draft(), two_blocks.anchors[0].tolist()
    before = block_states(draft, two_blocks)
    for position, want in ((first, [True, False]), (second, [False, True])):
        ids = two_blocks.ids.clone()
        ids[0, position] = (ids[0, position] + 1) % 90  # only the block's own input reads ids
        assert changed(before, block_states(draft, replace(two_blocks, ids=ids))) == want


@torch.no_grad()
def test_context_ends_strictly_before_the_anchor(two_blocks: Blocks) -> None:
    draft, (first, second) = tiny_draft(), two_blocks.anchors[0].tolist()
    before = block_states(draft, two_blocks)
    for position, want in (
        (first - 1, [True, True]),
        (first, [False, True]),
        (second - 1, [False, True]),
        (second, [False, False]),
    ):
        taps = two_blocks.taps.clone()
        taps[0, position] += 1
        assert changed(before, block_states(draft, replace(two_blocks, taps=taps))) == want


@torch.no_grad()
def test_within_a_block_every_slot_sees_every_other(two_blocks: Blocks) -> None:
    """Non-causal: changing what MASK is at the last slot would move slot 0, so the anchor does."""
    draft = tiny_draft()
    before = block_states(draft, two_blocks)
    ids = two_blocks.ids.clone()
    ids[0, two_blocks.anchors[0, 0]] = MASK_ID
    after = block_states(draft, replace(two_blocks, ids=ids))
    assert all(not torch.equal(before[0, 0, k], after[0, 0, k]) for k in range(BLOCK))
    # And backwards: row 0 attends to the key of the last row.
    assert isinstance(two_blocks.attention, Windows)
    assert bool(two_blocks.attention.whole()[0, 0, 0, two_blocks.ids.shape[1] + BLOCK - 1])


def test_block_inputs_are_the_anchor_and_the_configured_mask_token() -> None:
    ids = tiny_draft().block_ids(torch.tensor([[5, 7]]))
    assert ids.tolist() == [[[5] + [MASK_ID] * (BLOCK - 1), [7] + [MASK_ID] * (BLOCK - 1)]]


def test_positions_of_block_rows_continue_the_sequence(two_blocks: Blocks) -> None:
    first, second = two_blocks.anchors[0].tolist()
    want = [first + k for k in range(BLOCK)] + [second + k for k in range(BLOCK)]
    assert two_blocks.positions.tolist() == [want]
