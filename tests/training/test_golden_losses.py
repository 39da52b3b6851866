"""Losses of a fixed run at full precision: what a refactoring must not change.

The numbers were made by this code; another order of sums moves the last digits, a change of meaning
all of them. Renew them only together with the reason, by printing ``losses()``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.training.trainer import Trainer

# fmt: off
GOLDEN = [
    3.10803102, 3.20495009, 2.93966812, 3.02606365, 2.64658056,
    2.70162182, 2.67544943, 2.66895517, 2.58903879, 2.64458813,
]
# fmt: on


def losses(folder: Path, **changes: object) -> list[float]:
    target = tiny_target()
    section = tiny_section(batch_size=2, accumulate=2, epochs=4.0, **changes)
    trainer = Trainer(
        tiny_draft(target=target), target.head_weight(), tiny_records(target, 10), section, folder
    )
    return [row["loss"] for row in trainer.run()["steps"]]


def test_losses_are_those_of_the_record(tmp_path: Path) -> None:
    assert losses(tmp_path) == pytest.approx(GOLDEN, rel=1e-6)
