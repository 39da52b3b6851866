"""``capture.engine: vllm`` without vLLM: what is refused before any work, and what stays current."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conftest import dspark
from dspark.config.recipe import CaptureSection


def test_states_of_earlier_recipes_stay_current_and_vllms_are_others() -> None:
    usual, vllm = CaptureSection(), CaptureSection(engine="vllm")
    assert set(usual.identity()) == {"precision", "batch_tokens", "dtype"}
    assert vllm.identity() == {**usual.identity(), "engine": "vllm"}


@pytest.mark.parametrize("verb", [("capture",), ("train", "train.mode=replay")])
def test_without_an_environment_the_stage_says_how_to_get_one(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    """A trainer whose teachers would be vLLM says it at once, and does not wait for them."""
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(tmp_path / "nowhere"))
    for stage in ("prompts", "answers"):
        shutil.copytree(tiny_run / stage, tmp_path / "run" / stage)
    recipe, own = str(tiny_run.parent / "tiny.yaml"), verb[1:]
    done = dspark(verb[0], recipe, f"output={tmp_path / 'run'}", "capture.engine=vllm", *own)
    assert done.returncode == 2
    assert "make vllm" in done.stderr
