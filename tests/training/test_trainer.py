"""The loop: it learns, normalises over windows, keeps its plan and stops at nonsense."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK,
    VOCAB,
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.config.recipe import LossSection, TrainSection
from dspark.errors import DamagedArtifactError, TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.training.anchors import build_blocks, eligible
from dspark.training.checkpoint import FILE
from dspark.training.trainer import Trainer

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 10)


def make(folder: Path, records: list[HiddenRecord] = RECORDS, **changes: Any) -> Trainer:
    return Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), records, tiny_section(**changes), folder
    )


def test_training_lowers_the_loss_and_reports_what_the_report_reads(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    trainer = make(tmp_path, epochs=12.0, learning_rate=6e-3)
    history = trainer.run(lambda step, total, row: seen.append((step, total)))
    steps, evals = history["steps"], history["evals"]
    assert seen == [(i + 1, len(steps)) for i in range(len(steps))]
    assert sum(r["loss"] for r in steps[-5:]) < 0.8 * sum(r["loss"] for r in steps[:5])
    assert evals[-1]["tau_all"] > 1
    assert evals[-1]["step"] == len(steps)
    assert [e["step"] for e in evals][:2] == [4, 8]
    assert steps[-1]["learning_rate"] < 1e-4 < steps[0]["learning_rate"]
    row = steps[3]
    assert row["loss"] == pytest.approx(
        0.1 * row["ce"] + 0.9 * row["l1"] + row["confidence"], rel=1e-6
    )
    for evaluation in evals:
        assert len(evaluation["accept_rate"]) == BLOCK
        assert sum(evaluation["grad_share"].values()) == pytest.approx(1)
        assert min(evaluation["grad_share"].values()) > 0


def test_a_draft_vocabulary_leaves_its_outside_out_of_the_cross_entropy(tmp_path: Path) -> None:
    odd = torch.arange(1, VOCAB, 2)
    trainer = Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, tiny_section(), tmp_path, odd
    )
    row = trainer.run()["steps"][0]
    assert 0.2 < row["outside"] < 0.8
    assert row["ce"] > 1.0
    inside = 1 - row["outside"]
    assert row["loss"] == pytest.approx(
        0.1 * row["ce"] * inside + 0.9 * row["l1"] + row["confidence"], rel=1e-6
    )


def one_step(
    folder: Path, batch: int, accumulate: int, share: float
) -> tuple[dict[str, Any], Trainer]:
    """A whole epoch of 4 records as one optimiser step; all anchors, so nothing is random."""
    section: dict[str, Any] = {"batch_size": batch, "accumulate": accumulate, "num_anchors": 512}
    trainer = make(folder, RECORDS[:5], epochs=1.0, max_grad_norm=share, **section)
    assert len(trainer.training) == 4
    return trainer.run()["steps"][0], trainer


def test_accumulating_n_batches_of_one_equals_one_batch_of_n(tmp_path: Path) -> None:
    folders = [tmp_path / "many", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    many, a = one_step(folders[0], 1, 4, 1e6)
    one, b = one_step(folders[1], 4, 1, 1e6)
    for key in ("ce", "l1", "confidence", "loss", "grad_norm", "tokens"):
        assert many[key] == pytest.approx(one[key], rel=2e-6), key
    moments = [
        torch.cat([s["exp_avg"].flatten() for s in t.optimizer.state.values()]) for t in (a, b)
    ]
    assert torch.allclose(moments[0], moments[1], atol=1e-6 * float(moments[1].abs().max()))


def test_windows_do_not_overlap_an_epoch_counts_every_record_once(tmp_path: Path) -> None:
    trainer = make(tmp_path, RECORDS[:9], epochs=1.0, accumulate=2, num_anchors=512)
    steps = trainer.run()["steps"]
    assert (len(trainer.training), len(steps)) == (8, 2)
    everything = build_blocks(
        trainer.training, [eligible(r.loss_mask) for r in trainer.training], BLOCK
    )
    assert sum(row["tokens"] for row in steps) == int(everything.slot_mask.sum())
    assert len({len(r) for r in trainer.training}) > 4  # so that another choice would be seen


def test_gradients_are_clipped_to_the_global_norm(tmp_path: Path) -> None:
    """The first AdamW moment is (1 - 0.9) times the clipped gradient."""
    row, trainer = one_step(tmp_path, 4, 1, 0.01)
    first = torch.cat([s["exp_avg"].flatten() for s in trainer.optimizer.state.values()])
    assert row["grad_norm"] > 0.1
    assert float(first.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.draft.named_parameters()}


@pytest.mark.parametrize("poison", ["states", "weights"])
def test_a_non_finite_loss_stops_before_the_weights_are_touched(
    tmp_path: Path, poison: str
) -> None:
    records = RECORDS
    if poison == "states":
        # Finite states whose logits overflow: what a broken capture looks like to the loss.
        records = [replace(r, final=torch.full_like(r.final, 3e38)) for r in RECORDS]
    trainer = make(tmp_path, records)
    if poison == "weights":
        with torch.no_grad():
            trainer.draft.final_norm.weight[0] = math.inf
    before = weights(trainer)
    with pytest.raises(TrainingError, match="finite") as caught:
        trainer.run()
    assert caught.value.where == "training step 1"
    after = weights(trainer)
    assert all(torch.equal(after[n], w) for n, w in before.items())
    assert not (tmp_path / FILE).exists()


def test_a_learning_rate_that_diverges_is_an_error_and_the_last_checkpoint_is_sound(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path, learning_rate=1e30, warmup_ratio=0.0, checkpoint_every=1)
    with pytest.raises(TrainingError, match="learning_rate"):
        trainer.run()


def test_data_that_cannot_be_trained_on_is_refused_at_once(tmp_path: Path) -> None:
    full = [replace(r, loss_mask=torch.ones_like(r.loss_mask)) for r in RECORDS]
    none = [replace(r, loss_mask=torch.zeros_like(r.loss_mask)) for r in RECORDS]
    pre = [replace(r, norm_state="pre") for r in RECORDS]
    for records in (full, none, pre, RECORDS[:1], []):
        with pytest.raises(TrainingError):
            make(tmp_path, records)


def test_a_damaged_resume_file_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(DamagedArtifactError):
        make(tmp_path).run()


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    first = make(tmp_path)
    history = first.run()
    second = make(tmp_path)
    assert second.run() == history
    for name, parameter in second.draft.named_parameters():
        assert torch.equal(parameter, weights(first)[name])


def test_bf16_training_runs_on_fp32_master_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path, precision="bfloat16", loss=LossSection(ce_first=0.5))
    history = trainer.run()
    assert all(math.isfinite(row["loss"]) for row in history["steps"])
    assert {p.dtype for p in trainer.draft.parameters()} == {torch.float32}
    assert isinstance(trainer.section, TrainSection)


@pytest.mark.gpu
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(tmp_path: Path) -> None:
    head = TARGET.head_weight()
    rows = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        draft = tiny_draft(target=TARGET).to(device)
        trainer = Trainer(draft, head.to(device), RECORDS, tiny_section(), folder)
        rows.append(trainer.run())
    for a, b in zip(rows[0]["steps"], rows[1]["steps"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
