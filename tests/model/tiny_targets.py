"""Tiny random transformers models that the target tests compare with.

Weights are spread so that every layer changes the stream a lot: with the usual 0.02 a wrong layer,
a missing bias or a wrong norm would hide inside any tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.config.target import TargetConfig
from dspark.model.target import DecoderTarget
from dspark.model.weights import target_state

VOCAB = 97
LAYERS = 4
TAPS = (0, 1, 2)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-4,
}
_MOE: dict[str, Any] = {
    **_MLA,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (model_type, fields beyond the sizes)
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "llama-head-dim": ("llama", {**_GQA, "head_dim": 12, "num_key_value_heads": 1}),
    "llama-tied": ("llama", {**_GQA, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {**_GQA, "rope_parameters": _YARN}),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "mla": ("deepseek_v3", _MLA),
    "mla-full-query": ("deepseek_v3", {**_MLA, "q_lora_rank": None}),
    "mla-bias": ("deepseek_v3", {**_MLA, "attention_bias": True}),
    "mla-half-split": ("deepseek_v3", {**_MLA, "rope_interleave": False, "attention_bias": True}),
    "mla-half-split-full-query": (
        "deepseek_v3",
        {**_MLA, "rope_interleave": False, "q_lora_rank": None},
    ),
    "mla-moe": ("deepseek_v3", _MOE),
    "mla-moe-groups": (
        "deepseek_v3",
        {**_MOE, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
         "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
    "mla-yarn": ("deepseek_v3", {**_MLA, "rope_parameters": _YARN}),
    "mla-yarn-mscale": (
        "deepseek_v3",
        {**_MLA, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
}  # fmt: skip


def transformers_model(kind: str, **fields: Any) -> Any:
    """A random fp32 causal LM of ``model_type`` ``kind`` with the tiny sizes and ``fields``."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**_SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            else:
                weight.uniform_(0.5, 1.5)
            if "kv_a_proj" in name or "q_a_proj" in name:
                weight.mul_(0.01)  # small enough for the epsilon of the latent norms to matter
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)  # as strong as the scores: it decides who is chosen
    return model.requires_grad_(False)


def covered_model(name: str) -> Any:
    """The transformers side of :data:`COVERED`."""
    kind, fields = COVERED[name]
    return transformers_model(kind, **fields)


def decoder_of(model: Any, taps: tuple[int, ...] = TAPS) -> DecoderTarget:
    """Our decoder with the weights of ``model``, loaded the way a checkpoint is."""
    config = TargetConfig.from_hf(model.config.to_dict())
    with torch.device("meta"):
        target = DecoderTarget(config, taps)
    target.load_state_dict(target_state(config, model.state_dict()), assign=True)
    return target.eval().requires_grad_(False)


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted value."""
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())
