"""A live stream of hidden states from the real vLLM: trained on like the embedded teacher's."""

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

SHORT = ("train.epochs=1", "train.log=[jsonl]", "train.accumulate=2")
STEPS = 15


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    vllm_python()
    return trained_pair(Path(request.config.cache.mkdir("vllm")))


@pytest.fixture(autouse=True)
def in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What teachers, which are processes of the trainer's, find vLLM by."""
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(vllm_python()))
    for name, value in environment(plugin=True).items():
        monkeypatch.setenv(name, value)


def trained(pair: TrainedPair, run: Path, *overrides: str) -> dict[str, Any]:
    """One training: losses of its steps, and the last row of its log."""
    run.mkdir()
    for stage in ("prompts", "answers"):
        shutil.copytree(pair.run / stage, run / stage)
    done = dspark("train", str(pair.recipe), f"output={run}", *SHORT, *overrides)
    logs = [path.read_text() for path in run.glob("**/teacher-*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    history = json.loads((run / "draft" / "training.json").read_text())
    log = (run / "draft" / "metrics.jsonl").read_text().splitlines()
    config = json.loads((run / "draft" / "config.json").read_text())
    return {
        "losses": [step["loss"] for step in history["steps"]],
        "last": json.loads(log[-1]),
        "agreement": config["dspark_provenance"]["self_test"],
    }


@pytest.fixture(scope="module")
def embedded(pair: TrainedPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(pair, tmp_path_factory.mktemp("own") / "run", "train.mode=replay")


@pytest.mark.parametrize("transport", ["tcp", "shm", "disk"])
def test_replaying_in_vllm_trains_to_the_losses_of_the_embedded_teacher(
    pair: TrainedPair, embedded: dict[str, Any], tmp_path: Path, transport: str
) -> None:
    found = trained(
        pair, tmp_path / "run", "train.mode=replay", "capture.engine=vllm",
        f"train.stream.transport={transport}",
    )  # fmt: skip
    assert len(found["losses"]) == len(embedded["losses"]) >= STEPS
    assert found["losses"] == pytest.approx(embedded["losses"], rel=1e-4)
    assert found["agreement"]["states"] >= 0.99
    for name in ("stream_records", "stream_tokens"):
        assert found["last"][name] == embedded["last"][name] > 100
    assert not (tmp_path / "run" / "states").exists()


def test_prompts_answered_in_vllm_at_temperature_0_are_trained_on_alike(
    pair: TrainedPair, tmp_path: Path
) -> None:
    online = ("train.mode=online", "train.order=shuffled", "regenerate.temperatures=[0]")
    ours = trained(pair, tmp_path / "own", *online)
    theirs = trained(pair, tmp_path / "vllm", *online, "capture.engine=vllm")
    assert theirs["last"]["stream_tokens"] == ours["last"]["stream_tokens"]
    assert len(theirs["losses"]) >= STEPS
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-4)
