"""Long sequences: YaRN beyond the original context, length buckets, and phases at 100,000."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    BLOCK,
    made_record,
    one_thread,  # noqa: F401 (autouse)
    tiny_config,
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)
from torch import Tensor

from dspark.config.architecture import DraftConfig, Flavour, RopeParameters
from dspark.engine.drafter import Drafter
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.spans import BlockContext
from dspark.training.anchors import build_blocks
from dspark.training.batches import BatchPlan, Order, cut_rows
from dspark.training.step import block_states
from dspark.training.trainer import Trainer

ORIGINAL = 16
YARN = RopeParameters(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=16.0,
    original_max_position_embeddings=ORIGINAL,
    mscale_all_dim=1.0,
)
TARGET = tiny_target()


def long_config(flavour: Flavour, rope: RopeParameters = YARN) -> DraftConfig:
    config = tiny_config("vanilla", flavour)
    # Engines run qwen3 drafts with plain YaRN only.
    changes = {"mscale_all_dim": 0.0} if flavour == "qwen3" and rope.factor > 1 else {}
    own = {"rope_parameters": rope.model_dump() | changes, "max_position_embeddings": 131_072}
    return type(config).model_validate(config.model_dump() | own)


def long_draft(flavour: Flavour, rope: RopeParameters = YARN) -> DSparkDraft:
    """The tiny draft's weights under another rotation, which has no weights."""
    draft = DSparkDraft(long_config(flavour, rope))
    draft.load_state_dict(tiny_draft("vanilla", flavour).state_dict())
    return draft


def long_record(length: int, seed: int = 0) -> HiddenRecord:
    return made_record(f"long-{length}-{seed}", length, seed, 4)


@torch.no_grad()
def both_layouts(
    draft: DSparkDraft, record: HiddenRecord, anchors: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """(trained, served) states of every anchor's block."""
    trained = block_states(draft, build_blocks([record], [torch.tensor(anchors)], BLOCK))[0]
    served = Drafter(draft.eval(), TARGET.head_weight())
    rows = served.context_rows(record.taps, torch.arange(len(record)))
    found = []
    for i, anchor in enumerate(anchors):
        at = torch.tensor([anchor])
        context = [layer[:anchor].unsqueeze(0) for layer in rows]
        states = served.block_states(record.ids[at].long(), at, [BlockContext(context)])
        found.append((trained[i], states[0]))
    return found


@pytest.mark.parametrize("flavour", ["k3", "qwen3"])
@pytest.mark.parametrize(
    ("length", "anchors"),
    [(240, [5, 15, 16, 40, 130, 230]), (100_000, [20, 65_600, 99_990])],
    ids=["beyond the original context", "at 100,000"],
)
def test_serving_agrees_with_training_at_any_position(
    flavour: Flavour, length: int, anchors: list[int]
) -> None:
    draft = long_draft(flavour)
    for trained, served in both_layouts(draft, long_record(length), anchors):
        # Sums of 100,000 terms in fp32, in another order.
        assert float((trained - served).abs().max()) < 1e-4 * float(trained.abs().max())


def test_the_rotation_of_yarn_is_what_makes_positions_beyond_differ() -> None:
    """A draft that forgot its factor would serve other states there, not everywhere."""
    record, plain = long_record(240), RopeParameters(rope_theta=10_000.0)
    ours = both_layouts(long_draft("k3"), record, [230])[0][0]
    other = both_layouts(long_draft("k3", plain), record, [230])[0][0]
    assert float((ours - other).abs().max()) > 1e-2 * float(ours.abs().max())


def test_a_draft_with_yarn_learns_far_beyond_its_original_context(tmp_path: Path) -> None:
    """States of the real tiny target, whose answers are repeated until they are long."""
    short = tiny_records(TARGET, 8)
    records = []
    for record in short:
        times = 3 + 60 // len(record)
        fields = {
            name: torch.cat([getattr(record, name)] * times)
            for name in ("ids", "loss_mask", "taps", "final", "greedy", "log_z")
        }
        fields["loss_mask"][: len(record) * (times - 1)] = 0  # only what lies far back is trained
        records.append(type(record)(**{**vars(record), **fields}))
    assert min(int(r.loss_mask.nonzero()[0]) for r in records) > 2 * ORIGINAL
    draft = long_draft("k3")
    section = tiny_section(epochs=25.0, batch_tokens=300, batch_size=4, learning_rate=5e-3)
    history = Trainer(draft, TARGET.head_weight(), records, section, tmp_path).run()
    losses = [row["loss"] for row in history["steps"]]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    # And what was trained there is what is served there.
    at = [int(records[0].loss_mask.nonzero()[0]) + 1]
    for trained, served in both_layouts(draft, records[0], at):
        assert float((trained - served).abs().max()) < 2e-5 * float(trained.abs().max())


LENGTHS = [30, 31, 90, 33, 100_000, 40_000, 40, 5, 64, 65, 70_000, 17, *range(33, 53)]


def test_length_buckets_bound_padded_tokens_and_lose_no_row() -> None:
    order = Order(len(LENGTHS), LENGTHS, batch_size=4, seed=1, batch_tokens=131_072)
    for epoch in range(3):
        numbers = range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch)
        batches = [order.at(n) for n in numbers]
        assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
        for batch in batches:
            longest, shortest = max(LENGTHS[i] for i in batch), min(LENGTHS[i] for i in batch)
            assert len(batch) * longest <= 131_072 or len(batch) == 1
            assert longest < 2 * shortest
            assert len(batch) <= 4
    assert {frozenset(order.at(n)) for n in range(order.per_epoch)} != {
        frozenset(order.at(n)) for n in range(order.per_epoch, 2 * order.per_epoch)
    }


def test_a_plan_with_buckets_is_a_function_of_seed_and_number() -> None:
    records = tiny_records(TARGET, 9)
    plans = [
        BatchPlan(records, batch_size=4, num_anchors=2, block_size=BLOCK, seed=3, batch_tokens=40)
        for _ in range(2)
    ]
    for number in (5, 0, 3):
        first, second = (plan.micro_batch(number) for plan in plans)
        assert first.ids == second.ids
        assert len(first.ids) * max(len(r) for r in first.records) <= 40 or len(first.ids) == 1


def test_held_rows_are_cut_by_the_same_bound() -> None:
    section = tiny_section(batch_size=4, batch_tokens=100)
    parts = cut_rows([30, 30, 30, 30, 90, 200, 10, 10, 10, 10, 10], section)
    assert [(p.start, p.stop) for p in parts] == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 10), (10, 11)]
    plain = tiny_section(batch_size=4)
    assert [p.stop - p.start for p in cut_rows([9] * 10, plain)] == [4, 4, 2]
    assert cut_rows([], plain) == []


def test_buckets_need_to_know_lengths() -> None:
    with pytest.raises(ValueError, match="order: length"):
        tiny_section(order="shuffled", batch_tokens=100)
