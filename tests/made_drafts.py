"""Tiny drafts on disk for the checkpoint tests, and safetensors files made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.draft import save_draft
from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise

TARGET = {"target": "nobody/made-for-a-test", "norm_state": "post"}


def tiny_config(**changes: Any) -> K3DraftConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rope_parameters": RopeParameters(),
        "target_layer_ids": (0, 1),
        "target_num_hidden_layers": 4,
        "target_hidden_size": 16,
        "mask_token_id": 3,
        "markov_rank": 4,
    }
    return K3DraftConfig(**(sizes | changes))


def tiny_qwen3(**changes: Any) -> Qwen3DraftConfig:
    k3 = tiny_config().model_dump()
    shared = {key: k3[key] for key in Qwen3DraftConfig.model_fields if key in k3}
    sizes: dict[str, Any] = {**shared, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3DraftConfig(**(sizes | {"rope_parameters": RopeParameters()} | changes))


def tiny_draft(config: DraftConfig | None = None, seed: int = 0) -> DSparkDraft:
    return initialise(DSparkDraft(config or tiny_config()), None, seed)


def saved_draft(
    folder: Path, dtype: torch.dtype = torch.float32, config: DraftConfig | None = None
) -> DSparkDraft:
    """Write a tiny draft into ``folder`` and return it in the dtype of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = tiny_draft(config)
    save_draft(folder, draft, TARGET, dtype)
    return draft.to(dtype)


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change or remove fields of a saved config.json."""
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))
    return folder


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, also a wrong one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data
