"""Kimi-K3's own files: config, names and shapes of its tensors. transformers does not know them.

Read and written here are text models of this family at any size whose weights are plain floats. The
published checkpoint's routed experts are quantized (MXFP4); that is refused like any other
quantization our decoder does not run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.artifacts import atomic_json
from dspark.checkpoint.source import TargetFiles, first_line, weight_files
from dspark.checkpoint.tokenizer import listed_ids
from dspark.config.hybrid import usual_names
from dspark.config.target import TargetConfig
from dspark.errors import TargetError

FAMILY = "kimi_k3"
CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"


class K3Config:
    """A config.json of this family in the place of transformers' config objects: ``to_dict`` is its
    text part under the usual names."""

    model_type = FAMILY
    attribute_map: Mapping[str, str] = {}

    def __init__(self, raw: dict[str, Any]) -> None:
        self._sizes = usual_names(raw)

    def get_text_config(self) -> K3Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self._sizes)


def k3_config(files: TargetFiles) -> K3Config | None:
    """The config when ``files`` are of this family, None when not.

    Raises:
        TargetError: of this family, but not as its config.json is.
    """
    if files.gguf is not None or files.hub:
        return None
    try:
        raw = json.loads((Path(files.location) / CONFIG).read_bytes())
        if not isinstance(raw, dict) or raw.get("model_type") != FAMILY:
            return None
        return K3Config(raw)
    except (OSError, ValueError):
        return None  # transformers says what is wrong with it
    except (KeyError, TypeError) as error:
        raise TargetError(
            expected="the config.json of a Kimi-K3 model",
            found=f"{type(error).__name__}: {error}",
            where=f"target.source {files.source}",
            fix="Copy config.json again.",
        ) from error


def read_k3(files: TargetFiles, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """(tensors under their published names, end-of-sequence ids).

    The router's and the decays' numbers stay float32, as the model has them.

    Raises:
        TargetError: damaged files.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for path in weight_files(files):
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
        generation = Path(files.location) / GENERATION
        raw = json.loads(generation.read_bytes()) if generation.is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise TargetError(
            expected="whole files of a Kimi-K3 model",
            found=first_line(error),
            where=f"target.source {files.source}",
            fix="Copy or download the target again: a file is damaged or truncated.",
        ) from error
    exact = ("A_log", "dt_bias", ".gate.weight", "e_score_correction_bias")
    kept = {n: t if n.endswith(exact) else t.to(dtype) for n, t in tensors.items()}
    return kept, listed_ids(raw.get("eos_token_id"))


def write_k3(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a model; ``config`` is the whole config.json, ``eos_token_id`` of its text part goes
    into generation_config.json."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    atomic_json(folder / GENERATION, {"eos_token_id": config["text_config"]["eos_token_id"]})
    atomic_json(folder / CONFIG, dict(config))


def k3_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of every tensor of a model of ``config``."""
    hidden = config.hidden_size
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        **_mix("model.output_attn_res", hidden),
    }
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = (hidden,)
        out[at + "post_attention_layernorm.weight"] = (hidden,)
        out |= _mix(at + "self_attention_res", hidden) | _mix(at + "mlp_res", hidden)
        recurrent = layer in config.recurrent_layers
        out |= (_kda if recurrent else _mla)(config, at + "self_attn.")
        out |= _feed_forward(config, layer, at)
    return out


def _mix(at: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}_norm.weight": (hidden,), f"{at}_proj.weight": (1, hidden)}


def _kda(config: TargetConfig, at: str) -> dict[str, tuple[int, ...]]:
    linear, hidden = config.linear, config.hidden_size
    assert linear is not None
    d, width = linear.head_dim, linear.width
    out: dict[str, tuple[int, ...]] = {}
    for part in "qkv":
        out[f"{at}{part}_proj.weight"] = (width, hidden)
        out[f"{at}{part}_conv1d.weight"] = (width, 1, linear.kernel)
    out[at + "f_a_proj.weight"], out[at + "f_b_proj.weight"] = (d, hidden), (width, d)
    out[at + "b_proj.weight"], out[at + "g_proj.weight"] = (linear.heads, hidden), (width, hidden)
    # The published file has more numbers than heads.
    out[at + "A_log"], out[at + "dt_bias"] = (max(d, linear.heads),), (width,)
    out[at + "o_norm.weight"], out[at + "o_proj.weight"] = (d,), (hidden, width)
    return out


def _mla(config: TargetConfig, at: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q, kv, nope, rope, v = (
        int(size or 0)
        for size in (config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim,
                     config.qk_rope_head_dim, config.v_head_dim)
    )  # fmt: skip
    return {
        at + "q_a_proj.weight": (q, hidden),
        at + "q_a_layernorm.weight": (q,),
        at + "q_b_proj.weight": (heads * (nope + rope), q),
        at + "kv_a_proj_with_mqa.weight": (kv + rope, hidden),
        at + "kv_a_layernorm.weight": (kv,),
        at + "kv_b_proj.weight": (heads * (nope + v), kv),
        at + "g_proj.weight": (heads * v, hidden),
        at + "o_proj.weight": (hidden, heads * v),
    }


def _feed_forward(config: TargetConfig, layer: int, at: str) -> dict[str, tuple[int, ...]]:
    hidden, experts = config.hidden_size, config.experts_of(layer)
    if experts is None:
        return _mlp(at + "mlp", hidden, config.intermediate_size)
    at += "block_sparse_moe."
    size, latent = experts.moe_intermediate_size, int(experts.routed_expert_hidden_size or 0)
    out = {
        at + "gate.weight": (experts.n_routed_experts, hidden),
        at + "gate.e_score_correction_bias": (experts.n_routed_experts,),
        at + "routed_expert_down_proj.weight": (latent, hidden),
        at + "routed_expert_up_proj.weight": (hidden, latent),
        **_mlp(at + "shared_experts", hidden, size * experts.n_shared_experts),
    }
    if experts.latent_moe_use_norm:
        out[at + "routed_expert_norm.weight"] = (latent,)
    for n in range(experts.n_routed_experts):
        for name, shape in (("w1", (size, latent)), ("w2", (latent, size)), ("w3", (size, latent))):
            out[f"{at}experts.{n}.{name}.weight"] = shape
    return out


def _mlp(at: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (size, hidden),
        f"{at}.up_proj.weight": (size, hidden),
        f"{at}.down_proj.weight": (hidden, size),
    }
