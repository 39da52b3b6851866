"""GGUF read directly: the same weights as transformers gives, and no silent loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_targets import made_model, write_gguf

from dspark.checkpoint.gguf import GGUFFile
from dspark.checkpoint.pretrained import read_config, read_model
from dspark.checkpoint.source import find_target
from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig
from dspark.errors import ConfigError, TargetError
from dspark.model.spans import Span

pytest.importorskip("gguf")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 12, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # the only one transformers reads: it ignores the key
}


def opened(path: Path) -> GGUFFile:
    return GGUFFile(find_target(str(path)))


@pytest.mark.parametrize("name", KINDS)
def test_weights_and_sizes_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, fields = KINDS[name]
    model = made_model(kind, **fields)
    path = write_gguf(tmp_path / "m.gguf", model)
    files = find_target(str(path))
    read = read_config(files)
    by_transformers = read_model(files, read, torch.float32).state_dict()
    state = opened(path).state(torch.float32)
    tied = {"lm_head.weight"} if fields.get("tie_word_embeddings") else set()
    assert set(state) == set(by_transformers) - tied
    for key, tensor in state.items():
        assert torch.equal(tensor, by_transformers[key]), key
        assert torch.equal(tensor, model.state_dict()[key]), key
    assert opened(path).config() == TargetConfig.from_hf(read.to_dict())


def test_the_loaded_target_answers_like_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = made_model()
    path = write_gguf(tmp_path / "m.gguf", model)
    target = load_target(TargetSection(source=str(path), device="cpu", max_context=64))
    assert target.end_ids == (2,)
    assert target.tokenizer.eos_token_id == 2
    assert target.tokenizer.chat_template
    ids = torch.tensor([[1, 20, 9, 30]])
    built = target.build((0,))
    with torch.no_grad():
        out = built.forward(ids, Span.alone(1, 4, torch.device("cpu")), None)
        gap = (built.logits(out.final) - model(ids).logits).abs().max()
    assert float(gap) < 1e-4


def test_weights_are_rounded_once_to_the_dtype_asked_for(tmp_path: Path) -> None:
    model = made_model()
    state = opened(write_gguf(tmp_path / "m.gguf", model)).state(torch.bfloat16)
    for key, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[key].bfloat16()), key


def test_rotary_scaling_is_refused_because_it_would_be_ignored(tmp_path: Path) -> None:
    for number, options in enumerate(({"scaling": "yarn"}, {"extra": ("rope_freqs.weight",)})):
        path = write_gguf(tmp_path / f"{number}.gguf", made_model(), **options)
        with pytest.raises(TargetError, match="scaling"):
            opened(path)
    plain = write_gguf(tmp_path / "plain.gguf", made_model(), scaling="none")
    assert opened(plain).covered


def test_a_tensor_no_family_has_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", made_model(), extra=("blk.0.ffn_gate_exps.weight",))
    with pytest.raises(TargetError, match="ffn_gate_exps"):
        opened(path).state(torch.float32)


def test_missing_tensors_and_sizes_are_refused(tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "a.gguf", made_model(), left_out=(lost,))
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj"):
        load_target(TargetSection(source=str(path), device="cpu", max_context=64))
    path = write_gguf(tmp_path / "b.gguf", made_model(), without=("head_count",))
    with pytest.raises(TargetError, match="head_count"):
        opened(path).config()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", made_model())
    whole = path.read_bytes()
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(TargetError, match=r"m\.gguf"):
            opened(path).state(torch.float32)
    path.write_bytes(b"not a GGUF file at all")
    with pytest.raises(TargetError, match="magic"):
        opened(path)


def test_a_context_beyond_the_files_own_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", made_model())
    with pytest.raises(ConfigError, match=r"target\.max_context"):
        load_target(TargetSection(source=str(path), device="cpu", max_context=500))
