"""``dspark doctor --engine vllm``: the live checks on what the real vLLM answers and computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trained_pair import TrainedPair, trained_pair
from vllm_environment import environment, vllm_python

from conftest import dspark

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["qwen3", "k3"])
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    vllm_python()
    return trained_pair(Path(request.config.cache.mkdir("vllm")), request.param)


def examined(
    pair: TrainedPair, draft: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> dict[str, Any]:
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(vllm_python()))
    for name, value in environment(plugin=True).items():
        monkeypatch.setenv(name, value)
    done = dspark(
        "doctor", str(draft), "--engine", "vllm", "--target", str(pair.target), "--json", *words
    )
    assert done.returncode in {0, 1}, done.stderr
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["sound"] == (done.returncode == 0)
    return {c["id"]: c for c in found["checks"]}


def test_a_sound_draft_passes_every_live_check_in_vllm(
    pair: TrainedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = examined(pair, pair.draft, monkeypatch)
    live = {name: c for name, c in checks.items() if name.startswith("live.")}
    assert {c["status"] for c in live.values()} == {"pass"}, live
    assert "vLLM 0.32.0" in live["live.engine"]["found"]
    assert live["live.identity"]["found"] == "4 of 4 prompts"
    # On the draft's own workload: what our bench decoded, vLLM decodes too.
    assert "bench of" in live["live.acceptance"]["found"]
    assert float(live["live.acceptance"]["found"].split()[0]) > 4
    assert live["live.states"]["found"].startswith("100.0%")
    assert live["live.taps"]["found"].count("e-0") >= 3


def test_layers_that_are_one_too_high_are_found_by_what_vllm_computes(
    pair: TrainedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for stage in ("prompts", "answers"):
        shutil.copytree(pair.run / stage, run / stage)
    for verb in ("capture", "train"):
        done = dspark(verb, str(pair.recipe), f"output={run}", "draft.target_layer_ids=[0,1]")
        assert done.returncode == 0, done.stderr
    (tmp_path / "draft").mkdir()
    shutil.copy(run / "draft" / "model.safetensors", tmp_path / "draft")
    raw = json.loads((run / "draft" / "config.json").read_text())
    for key in {"target_layer_ids", "dspark_target_layer_ids"} & set(raw):
        raw[key] = [1, 2]
    del raw["dspark_provenance"]["trained"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    words = ("--prompts", str(pair.root / "prompts.jsonl"))
    checks = examined(pair, tmp_path / "draft", monkeypatch, *words)
    assert checks["live.engine"]["status"] == "pass"
    # The engine is right: its layer 1 is layer 1. The draft was trained on another.
    assert checks["live.taps"]["status"] == "pass"
    assert checks["live.states"]["status"] == "pass"
    assert checks["live.layers"]["status"] == "fail"
    assert "layers one lower [0, 1]" in checks["live.layers"]["cause"]
