"""Targets that transformers would load wrongly, late or with a traceback are refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_targets import saved
from safetensors.torch import load_file, save_file

from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.errors import ConfigError, DSparkError, MissingDependencyError, TargetError
from dspark.model.spans import Span


def load(path: Path, **fields: Any) -> Any:
    options = {"max_context": 64, "device": "cpu", **fields}
    return load_target(TargetSection(source=str(path), **options))


def refusal(path: Path, kind: type[DSparkError] = TargetError, **fields: Any) -> DSparkError:
    with pytest.raises(kind) as caught:
        load(path, **fields)
    assert type(caught.value) is kind
    assert all((caught.value.expected, caught.value.found, caught.value.where, caught.value.fix))
    return caught.value


def change(path: Path, name: str = "config.json", **values: Any) -> None:
    raw = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**raw, **values}))


def change_weights(path: Path, **values: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = load_file(str(file))
    for name, value in values.items():
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, str(file), {"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_sound_target_loads_for_our_decoder_or_the_adapter(tmp_path: Path, kind: str) -> None:
    target = load(saved(tmp_path / "m", kind))
    assert (target.config is None) == (kind == "mistral")
    assert target.end_ids == (2,)
    assert target.shape.hidden_size == 32
    assert target.shape.num_attention_heads == 4
    assert target.max_context == target.shape.max_position_embeddings == 64
    model = target.build((0,))
    out = model.forward(torch.tensor([[1, 5, 9]]), Span.alone(1, 3, torch.device("cpu")), None)
    assert bool(torch.isfinite(model.logits(out.final)).all())


def test_families_with_names_of_their_own_have_their_sizes(tmp_path: Path) -> None:
    shape = load(saved(tmp_path / "m", "gpt2")).shape
    assert "hidden_size" not in json.loads((tmp_path / "m" / "config.json").read_text())
    assert (shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads) == (32, 2, 4)
    assert refusal(tmp_path / "m", ConfigError, max_context=129).where == "target.max_context"


def test_a_family_without_attention_is_refused(tmp_path: Path) -> None:
    assert "mamba" in refusal(saved(tmp_path / "m", "mamba", num_attention_heads=0)).found


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(str(path / "model.safetensors"))
    assert load(path).config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_weight_is_refused_and_never_random(tmp_path: Path, kind: str, name: str) -> None:
    path = saved(tmp_path / "m", kind)
    change_weights(path, **{name: None})
    found = refusal(path).found
    assert name in found
    assert "1 weights that the files lack" in found


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in refusal(path).fix
    file.write_bytes(b"no safetensors")
    assert "Safetensor" in refusal(path).found


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    change(path, vocab_size=40)
    assert "embed_tokens" in refusal(path).found or "size" in refusal(path).found


def test_layers_that_the_config_leaves_out_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    change(path, num_hidden_layers=1)
    assert "layers.1." in refusal(path).found


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_broken_json_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "m")
    (path / name).write_text('{"model_type": "llama", ')
    refusal(path)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    weights = load_file(str(path / "model-00001-of-00002.safetensors"))
    index = {n: f"model-0000{1 + (i > 3)}-of-00002.safetensors" for i, n in enumerate(weights)}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    assert "model-00002-of-00002" in refusal(path).found


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    for file in path.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer.json" in refusal(path).found


def test_code_that_comes_with_a_target_is_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    change(path, model_type="mine", auto_map={"AutoConfig": "mine.Config",
           "AutoModelForCausalLM": "mine.Model"})  # fmt: skip
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refusal(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("No module named 'fla.ops'", name="fla.ops"), "fla"),
        (ImportError("This model needs it: `pip install mamba-ssm`"), "mamba-ssm"),
        (ValueError("you need to have nonesuch or sentencepiece installed"), "sentencepiece"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, package: str
) -> None:
    import importlib.util

    import transformers

    def fail(*_: Any, **__: Any) -> None:
        raise error

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "sentencepiece" else real(n, *a)
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    found = refusal(saved(tmp_path / "m"), MissingDependencyError)
    assert found.fix == f"pip install {package}"


def test_a_context_beyond_the_targets_own_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"would fail if it were read")
    found = refusal(path, ConfigError, max_context=129)
    assert found.where == "target.max_context"
    assert "128" in found.fix


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    for device in ("toaster", "cuda:99"):
        assert refusal(path, ConfigError, device=device).where == "target.device"
