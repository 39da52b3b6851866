"""``capture.engine: vllm`` without vLLM: what is refused before any work, and what stays current."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from conftest import dspark
from dspark.cli.context import RunContext
from dspark.cli.vllm_capture import vllm_model
from dspark.config.load import load_recipe
from dspark.config.recipe import CaptureSection


def test_states_of_earlier_recipes_stay_current_and_vllms_are_others() -> None:
    usual, vllm = CaptureSection(), CaptureSection(engine="vllm")
    assert set(usual.identity()) == {"precision", "batch_tokens", "dtype"}
    assert vllm.identity() == {**usual.identity(), "engine": "vllm"}


def test_a_hub_target_is_handed_over_as_the_snapshot_of_its_pinned_commit(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself would take whatever the branch has become."""
    hub = tmp_path / "models--some--target"
    commits = ("a" * 40, "b" * 40)
    for commit in commits:
        (hub / "snapshots" / commit).mkdir(parents=True)
        (hub / "snapshots" / commit / "config.json").write_text("{}")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commits[1])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", sys.executable)
    pinned = ["target.source=some/target", f"target.revision={commits[0]}"]
    for overrides, commit in ((pinned, commits[0]), (pinned[:1], commits[1])):
        run = RunContext(load_recipe(tiny_recipe, [*overrides, "capture.engine=vllm"]), "test")
        assert vllm_model(run) == str(hub / "snapshots" / commit)


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
