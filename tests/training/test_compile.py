"""``train.compile``: the compiled MLPs give the losses of the eager ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.training.trainer import Trainer

TARGET = tiny_target()


def run(folder: Path, **changes: object) -> dict[str, list[dict[str, Any]]]:
    folder.mkdir()
    section = tiny_section(epochs=3.0, accumulate=2, **changes)
    draft = tiny_draft(target=TARGET)
    trainer = Trainer(draft, TARGET.head_weight(), tiny_records(TARGET, 8), section, folder)
    return trainer.run()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_losses_equal_eager_ones(tmp_path: Path, precision: str) -> None:
    counters = torch._dynamo.utils.counters
    eager = run(tmp_path / "eager", precision=precision)
    counters.clear()
    compiled = run(tmp_path / "compiled", precision=precision, compile=True)
    assert counters["stats"]["unique_graphs"] >= 1  # and it was not eager again
    assert not counters["graph_break"]
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for name in ("loss", "grad_norm"):
        found, wanted = ([row[name] for row in rows["steps"]] for rows in (compiled, eager))
        assert found == pytest.approx(wanted, rel=tolerance)
    assert compiled["evals"][-1]["tau_all"] == pytest.approx(
        eager["evals"][-1]["tau_all"], rel=tolerance
    )
    losses = [row["loss"] for row in eager["steps"]]
    assert max(losses) - min(losses) > 0.05
