"""Schedules, Muon and averages: what the recipe says is what weights get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.training.optim import Average, Optimizers, build_optimizer, learning_rate
from dspark.training.trainer import Trainer

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 8)


@pytest.mark.parametrize(
    ("schedule", "middle", "late"),
    [("linear", 0.5, 0.1), ("wsd", 1.0, 0.5), ("cosine", 0.5, 0.0245)],
)
def test_rates_at_half_and_nine_tenths_of_a_schedule(
    schedule: str, middle: float, late: float
) -> None:
    section = tiny_section(schedule=schedule, warmup_ratio=0.0, learning_rate=1.0, decay_ratio=0.2)
    rates = [learning_rate(section, step, 1001) for step in range(1001)]
    assert rates[501] == pytest.approx(middle, abs=2e-3)
    assert rates[901] == pytest.approx(late, abs=2e-3)
    assert rates[-1] < 0.01
    assert all(b <= a for a, b in zip(rates[1:], rates[2:], strict=False))


def test_muon_gets_the_layers_matrices_and_nothing_else() -> None:
    draft = tiny_draft(target=TARGET)
    optimizer = build_optimizer(draft, tiny_section(optimizer="muon"))
    assert isinstance(optimizer, Optimizers)
    names = {id(p): n for n, p in draft.named_parameters()}
    muon, adamw = (
        {names[id(p)] for g in part.param_groups for p in g["params"]} for part in optimizer.parts
    )
    assert {
        n for n in names.values() if n.startswith("layers.") and not n.endswith("norm.weight")
    } == muon
    trained = {n for n, p in draft.named_parameters() if p.requires_grad}
    assert muon | adamw == trained
    assert not muon & adamw
    assert "embed_tokens.weight" not in trained


def losses(folder: Path, **changes: object) -> list[float]:
    folder.mkdir(exist_ok=True)
    trainer = Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, tiny_section(**changes), folder
    )
    return [row["loss"] for row in trainer.run()["steps"]]


def test_muon_learns_and_resumes_exactly(tmp_path: Path) -> None:
    settings = {"optimizer": "muon", "epochs": 8.0, "ema": 0.8, "eval_every": 100}
    want = losses(tmp_path / "straight", **settings)
    assert sum(want[-4:]) < 0.9 * sum(want[:4])
    folder = tmp_path / "cut"
    folder.mkdir()
    trainer = Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, tiny_section(**settings), folder
    )

    def stop(step: int, total: int, row: dict[str, object]) -> None:
        if step == 10:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        trainer.run(stop)
    assert losses(folder, **settings) == want


def test_the_average_is_the_average_and_is_what_is_written(tmp_path: Path) -> None:
    draft = tiny_draft(target=TARGET)
    average = Average(draft, 0.75)
    name, weight = next((n, p) for n, p in draft.named_parameters() if p.requires_grad)
    first = weight.detach().clone()
    with torch.no_grad():
        weight.add_(4.0)
    average.update()
    torch.testing.assert_close(average.values[name], first + 1.0)
    average.swap()
    torch.testing.assert_close(weight.detach(), first + 1.0)
    average.swap()
    torch.testing.assert_close(weight.detach(), first + 4.0)

    trainer = Trainer(
        tiny_draft(target=TARGET), TARGET.head_weight(), RECORDS, tiny_section(ema=0.9), tmp_path
    )
    trainer.run()
    assert trainer.average is not None
    kept = {n: v.clone() for n, v in trainer.average.values.items()}
    written = dict(trainer.finished().named_parameters())
    for key, value in kept.items():
        assert torch.equal(written[key], value), key
        assert not torch.equal(dict(trainer.draft.named_parameters())[key], value), key
