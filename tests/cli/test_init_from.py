"""``train.init_from``: another draft's weights are the start, and their content decides the work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import dspark_each
from dspark.cli.context import RunContext
from dspark.cli.pipeline import config_of
from dspark.config.load import load_recipe


def test_the_content_of_the_start_is_in_the_fingerprint_and_its_path_is_not(
    tiny_run: Path, tmp_path: Path
) -> None:
    recipe = str(tiny_run.parent / "tiny.yaml")
    plain = ["train.warm_start.markov=false"]
    for name in ("here", "there", "other"):
        shutil.copytree(tiny_run / "draft", tmp_path / name)
    weights = tmp_path / "other" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    def config(*overrides: str) -> dict[str, object]:
        return config_of(RunContext(load_recipe(recipe, [*plain, *overrides]), ""), "draft")

    here, there, other = (
        config(f"train.init_from={tmp_path / name}") for name in ("here", "there", "other")
    )
    assert here == there
    assert here != other
    assert here != config()


def test_training_on_from_a_finished_draft_starts_where_it_was(tiny_run: Path) -> None:
    recipe, root = str(tiny_run.parent / "tiny.yaml"), tiny_run.parent
    work = root / "continued"
    for kind in ("prompts", "answers", "states"):
        shutil.copytree(tiny_run / kind, work / kind)
    start = [
        f"output={work}", f"train.init_from={tiny_run / 'draft'}", "train.warm_start.markov=false",
        "train.epochs=1", "train.learning_rate=1e-9", "train.loss.ce_first=0",
    ]  # fmt: skip
    done, refused, absent, both = dspark_each(
        ["train", recipe, *start],
        ["train", recipe, *start, "draft.block_size=5", "draft.kv_lora_rank=16"],
        ["train", recipe, *start, "train.init_from=/nowhere"],
        ["train", recipe, *start, "train.warm_start.markov=true"],
    )
    assert done.returncode == 0, done.stderr
    before = json.loads((tiny_run / "draft" / "training.json").read_text())["evals"][-1]
    after = json.loads((work / "draft" / "training.json").read_text())["evals"][0]
    assert abs(after["tau_all"] - before["tau_all"]) < 0.02
    raw = json.loads((work / "draft" / "config.json").read_text())
    assert len(raw["dspark_provenance"]["init_from_sha256"]) == 64

    assert refused.returncode == 2
    for said in ("train.init_from", "block_size 7 instead of 5", "kv_lora_rank 32 instead of 16"):
        assert said in refused.stderr.replace("\n", " "), refused.stderr
    assert (work / "draft" / "manifest.json").exists(), "finished work was moved for nothing"
    assert absent.returncode == 1
    assert "/nowhere" in absent.stderr
    assert both.returncode == 2
    assert "train.warm_start.markov" in both.stderr
