"""`dspark run` with a live teacher: from prompts to report without a state on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import dspark

SHORT = ("train.epochs=2", "train.accumulate=2", "train.order=shuffled", "train.decode_every=30")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_run_with_a_teacher_beside_it(tiny_recipe: Path, mode: str) -> None:
    done = dspark("run", str(tiny_recipe), f"train.mode={mode}", "train.log=[jsonl]", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tiny_recipe.parent / "run"
    made = {"prompts", "draft", "bench"} | ({"answers"} if mode == "replay" else set())
    assert {p.name for p in run.iterdir() if p.is_dir()} == made
    names = {p.name for p in (run / "draft").iterdir()}
    assert {"model.safetensors", "rank-0.ledger.jsonl", "metrics.jsonl"} <= names
    assert not [n for n in names if n.startswith(("teacher", "resume", "best"))]
    metrics = [
        json.loads(line) for line in (run / "draft" / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics[-1]["stream_records"] > 300
    assert metrics[-1]["stream_groups"] == 0
    history = json.loads((run / "draft" / "training.json").read_text())
    assert history["evals"][-1]["tau_all"] > 1.2
    assert history["decoded"][-1]["acceptance_length"] > 1
    config = json.loads((run / "draft" / "config.json").read_text())
    assert config["dspark_provenance"]["training_mode"] == mode
    again = dspark("train", str(tiny_recipe), f"train.mode={mode}", "train.log=[jsonl]", *SHORT)
    assert "finished before" in again.stdout


def test_a_teacher_needs_a_stream_to_serve(tiny_recipe: Path) -> None:
    done = dspark("teach", str(tiny_recipe), "--connect", "tcp://127.0.0.1:1")
    assert done.returncode == 2
    assert "train.mode" in done.stderr


@pytest.mark.slow
def test_an_online_teacher_plays_conversations_to_their_end(tiny_recipe: Path) -> None:
    file = tiny_recipe.parent / "prompts.jsonl"
    first = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    pairs = zip(first[::2], first[1::2], strict=False)
    file.write_text("".join(json.dumps({"turns": list(turns)}) + "\n" for turns in pairs))
    tiny_recipe.write_text(tiny_recipe.read_text().replace("train: 160", "train: 80"))
    online = ("train.mode=online", "train.order=shuffled", "train.log=[jsonl]", "train.epochs=1")
    tokens = {}
    for turns in (1, 2):
        own = (*online, f"regenerate.turns={turns}", f"output={tiny_recipe.parent / str(turns)}")
        for verb in ("prompts", "train"):
            done = dspark(verb, str(tiny_recipe), *own)
            assert done.returncode == 0, done.stdout + done.stderr
        log = tiny_recipe.parent / str(turns) / "draft" / "metrics.jsonl"
        last = json.loads(log.read_text().splitlines()[-1])
        tokens[turns] = last["stream_tokens"] / last["stream_records"]
    assert tokens[2] > 1.6 * tokens[1]
