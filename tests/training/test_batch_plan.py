"""What each step sees is a function of (seed, number); unusable data is refused before training."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from tiny_models import BLOCK, record_of, tiny_records, tiny_section, tiny_target

from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row
from dspark.model.windows import Windows
from dspark.training.anchors import Blocks
from dspark.training.batches import (
    BatchPlan,
    require_anchors,
    require_normed,
    split_validation,
)
from dspark.training.parallel import Solo
from dspark.training.streamed import Sizes, StreamPlan

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 11)
SHORT = record_of(TARGET, [1, 2, 3, 4], 3, name="a-short")  # one answer token: no anchor


def plan(seed: int = 3, records: list[HiddenRecord] = RECORDS) -> BatchPlan:
    return BatchPlan(records, batch_size=3, num_anchors=2, block_size=BLOCK, seed=seed)


def same(a: Blocks, b: Blocks) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "attention"]
    seen = [blocks.attention for blocks in (a, b)]
    masks = [
        part.mask for windows in seen if isinstance(windows, Windows) for part in windows.parts
    ]
    half = len(masks) // 2
    pairs += zip(masks[:half], masks[half:], strict=True)
    return half > 0 and all(torch.equal(x, y) for x, y in pairs)


def owners(blocks: Blocks) -> list[int]:
    """Which record each row is, found by its tokens."""
    found = []
    for row in blocks.ids:
        ids = row.tolist()
        found += [i for i, r in enumerate(RECORDS) if ids[: len(r)] == r.ids.tolist()]
    return found


def test_a_batch_depends_on_seed_and_number_only() -> None:
    ordered, numbers = plan(), [0, 1, 2, 3, 4, 9]
    want = {n: ordered.batch(n) for n in numbers}
    torch.manual_seed(1234)
    other = plan()
    for n in reversed(numbers):  # another order, another process state, another instance
        assert same(other.batch(n), want[n])
    assert not all(same(plan(seed=4).batch(n), want[n]) for n in numbers)


def test_an_epoch_shows_every_record_once_and_epochs_differ() -> None:
    own = plan()
    epochs = [
        [owners(own.batch(e * own.per_epoch + i)) for i in range(own.per_epoch)] for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(len(RECORDS)))
    assert epochs[0] != epochs[1] != epochs[2]


def test_anchors_are_drawn_anew_each_epoch() -> None:
    one = plan(records=RECORDS[:1])
    drawn = {tuple(one.batch(n).anchors[0].tolist()) for n in range(12)}
    assert len(drawn) > 4


def test_validation_is_disjoint_stable_and_never_everything() -> None:
    kept, held = split_validation(RECORDS, share=4)
    assert {r.id for r in kept}.isdisjoint(r.id for r in held)
    assert len(kept) + len(held) == len(RECORDS)
    assert len(held) == 3
    again = split_validation(list(reversed(RECORDS)), share=4)
    assert [r.id for r in again[1]] == [r.id for r in held]
    assert [len(side) for side in split_validation(RECORDS[:2])] == [1, 1]


def test_records_without_an_anchor_belong_to_no_side() -> None:
    kept, held = split_validation([SHORT, *RECORDS[:2]])
    assert {r.id for r in kept + held} == {r.id for r in RECORDS[:2]}
    with pytest.raises(TrainingError, match="at least two answers"):
        split_validation([SHORT, RECORDS[0]])


def test_an_empty_loss_mask_is_refused() -> None:
    silent = [replace(r, loss_mask=torch.zeros_like(r.loss_mask)) for r in RECORDS]
    with pytest.raises(TrainingError, match="no eligible anchor"):
        require_anchors(silent)
    with pytest.raises(TrainingError, match="no eligible anchor"):
        require_anchors([SHORT])


def test_a_loss_mask_of_all_ones_is_refused() -> None:
    full = replace(RECORDS[4], loss_mask=torch.ones_like(RECORDS[4].loss_mask))
    with pytest.raises(TrainingError, match="every token supervised") as caught:
        require_anchors([*RECORDS[:4], full])
    assert RECORDS[4].id in caught.value.where
    require_anchors(RECORDS)


def test_states_from_before_the_norm_are_refused_by_the_loop_itself() -> None:
    with pytest.raises(TrainingError, match="final norm"):
        require_normed([*RECORDS[:2], replace(RECORDS[2], norm_state="pre")])
    require_normed(RECORDS)


def test_a_stream_asks_for_the_batches_that_its_lengths_allow() -> None:
    """It once cut them by ``batch_size`` alone, and an epoch was not an epoch."""
    rows = [Row(f"{i:02d}", "made", 0.0, (7,) * (5 + 9 * (i % 4)), 3) for i in range(24)]
    section = tiny_section(mode="replay", order="length", batch_size=6, batch_tokens=64)
    own = StreamPlan(rows, section, BLOCK, Sizes(2, 8, 4), Solo())
    asked = [group.rows for group in own._groups(0, own.per_epoch)]
    assert sorted(r.id for part in asked for r in part) == [r.id for r in own.rows]
    padded = [len(part) * max(r.longest for r in part) for part in asked]
    assert max(padded) <= 64 < 6 * max(r.longest for r in rows)
