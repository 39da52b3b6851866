"""``capture.engine: vllm`` without vLLM: what is refused before any work, and what stays current."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conftest import dspark
from dspark.config.load import load_recipe
from dspark.config.recipe import CaptureSection
from dspark.errors import ConfigError


def test_a_live_stream_from_vllm_is_refused_when_the_recipe_is_read(tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"found train\.mode replay"):
        load_recipe(tiny_recipe, ["capture.engine=vllm", "train.mode=replay"])


def test_states_of_earlier_recipes_stay_current_and_vllms_are_others() -> None:
    usual, vllm = CaptureSection(), CaptureSection(engine="vllm")
    assert set(usual.identity()) == {"precision", "batch_tokens", "dtype"}
    assert vllm.identity() == {**usual.identity(), "engine": "vllm"}


def test_without_an_environment_the_stage_says_how_to_get_one(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(tmp_path / "nowhere"))
    for stage in ("prompts", "answers"):
        shutil.copytree(tiny_run / stage, tmp_path / "run" / stage)
    recipe = str(tiny_run.parent / "tiny.yaml")
    done = dspark("capture", recipe, f"output={tmp_path / 'run'}", "capture.engine=vllm")
    assert done.returncode == 2
    assert "make vllm" in done.stderr
