"""The same examination of a draft with grouped attention: sound, and broken in the ways it can be."""

from __future__ import annotations

from pathlib import Path

import faulty
import pytest
import torch
from faulty import Weights, edit_weights
from rich.console import Console

from conftest import dspark, write_recipe
from dspark.cli.console import Screen
from dspark.cli.doctor import examine
from dspark.cli.doctor_target import Request
from dspark.doctor.findings import Examination
from dspark.doctor.rules import ENGINES

pytestmark = pytest.mark.slow
SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@pytest.fixture(scope="module")
def run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run with a draft of the other flavour."""
    root = tmp_path_factory.mktemp("qwen3")
    recipe = write_recipe(root, tiny_target)
    lines = recipe.read_text().splitlines()
    lines = [line for line in lines if line.split(":")[0].strip() not in SIZES]
    text = "\n".join(lines).replace(
        "draft:\n", "draft:\n  flavour: qwen3\n  head_dim: 24\n  num_key_value_heads: 2\n"
    )
    recipe.write_text(text)
    done = dspark("run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


@pytest.fixture
def draft(run: Path, tmp_path: Path) -> Path:
    return faulty.copy_of(run / "draft", tmp_path / "draft")


def examined(folder: Path, run: Path, target: Path) -> Examination:
    request = Request(folder, ENGINES, str(target), run.parent / "prompts.jsonl")
    return examine(request, Screen(Console(quiet=True)))


def test_the_sound_draft_passes(run: Path, draft: Path, tiny_target: Path) -> None:
    for folder in (run / "draft", draft):
        exam = examined(folder, run, tiny_target)
        assert exam.sound, [c for c in exam.checks if c.status == "fail"]
        assert {"live.layers", "live.layout", "live.norm", "live.rope"} <= set(exam.ids("pass"))


def test_interleaved_weights_are_named(run: Path, draft: Path, tiny_target: Path) -> None:
    order = torch.stack([torch.arange(12), torch.arange(12) + 12], 1).flatten()

    def permute(weights: Weights) -> None:
        for name, value in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weights[name] = value.unflatten(0, (-1, 24))[:, order].flatten(0, 1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights[name] = value[order]

    exam = examined(edit_weights(draft, permute), run, tiny_target)
    assert set(exam.ids("fail")) - {"live.acceptance"} == {"live.rope"}
    told = next(c for c in exam.checks if c.id == "live.rope")
    assert "interleaved rotary pairs" in told.cause
