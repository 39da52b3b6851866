"""A resume file restores everything or is refused by name; it is never half believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    tiny_config,
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.errors import DamagedArtifactError
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.training.checkpoint import FILE, TrainingState, load_state, save_state
from dspark.training.optim import build_optimizer
from dspark.training.trainer import Trainer

TARGET = tiny_target()
STATE = TrainingState(7, 20, 1.25, 0.35, {"steps": [{"step": 7, "ce": 2.5}], "evals": []})


def trained(folder: Path) -> Trainer:
    """A trainer a few real steps in, so that moments are not zero."""
    section = tiny_section(epochs=1.0)
    trainer = Trainer(tiny_draft(), TARGET.head_weight(), tiny_records(TARGET, 6), section, folder)
    trainer.run()
    return trainer


def test_weights_moments_and_counters_come_back_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    old = trained(tmp_path / "run")
    save_state(tmp_path, old.draft, old.optimizer, STATE)
    new = tiny_draft(seed=99)
    optimizer = build_optimizer(new, tiny_section())
    assert load_state(tmp_path, new, optimizer) == STATE
    for (name, a), b in zip(old.draft.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(a, b) == a.requires_grad, name
    mine, theirs = optimizer.state_dict()["state"], old.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys() != set()
    for key, moments in theirs.items():
        assert all(torch.equal(mine[key][m], value) for m, value in moments.items())


def test_without_a_file_there_is_nothing_to_resume(tmp_path: Path) -> None:
    draft = tiny_draft()
    assert load_state(tmp_path, draft, build_optimizer(draft, tiny_section())) is None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(bytes(content))


def fill(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def store(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def without_moments(path: Path) -> None:
    raw = torch.load(path, weights_only=True)
    del raw["optimizer"]
    torch.save(raw, path)


def broadcastable(path: Path) -> None:
    """A tensor of shape [1] would silently fill a whole norm."""
    raw = torch.load(path, weights_only=True)
    raw["weights"]["final_norm.weight"] = torch.ones(1)
    torch.save(raw, path)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_weight,
        fill(b""),
        fill(b"not a training state at all"),
        fill(bytes(range(256)) * 40),
        store([1, 2, 3]),
        store({"weights": {}, "optimizer": {}, "state": {}}),
        without_moments,
        broadcastable,
    ],
)
def test_a_damaged_resume_file_is_its_own_error(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    draft = tiny_draft()
    optimizer = build_optimizer(draft, tiny_section())
    save_state(tmp_path, draft, optimizer, STATE)
    damage(tmp_path / FILE)
    with pytest.raises(DamagedArtifactError) as caught:
        load_state(tmp_path, draft, optimizer)
    assert caught.value.where == str(tmp_path / FILE)
    assert "Delete" in caught.value.fix


def test_the_state_of_another_draft_is_refused(tmp_path: Path) -> None:
    draft = tiny_draft()
    save_state(tmp_path, draft, build_optimizer(draft, tiny_section()), STATE)
    others = [
        initialise(DSparkDraft(tiny_config(rank=5)), None, 0),
        tiny_draft("gated"),
    ]
    for other in others:
        with pytest.raises(DamagedArtifactError):
            load_state(tmp_path, other, build_optimizer(other, tiny_section()))
