"""What a target is, as far as our own decoder needs to know: sizes read from its config.json.

``TargetConfig.from_hf`` covers the Llama / Qwen2 / Qwen3 / SmolLM family (GQA) and the dense
DeepSeek-V3 kind (MLA). Anything else is a ``ValueError`` naming the reason; such targets run
through the transformers adapter instead (``dspark.model.hf_target``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from dspark.config.architecture import Frozen, RopeParameters


class TargetConfig(Frozen):
    """Sizes of a dense decoder-only target. MLA fields are ``None`` for GQA targets."""

    attention: Literal["gqa", "mla"]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    rms_norm_eps: float
    max_position_embeddings: PositiveInt
    rope_parameters: RopeParameters
    rope_interleave: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TargetConfig:
        """Translate a Hugging Face ``config.to_dict()``.

        Raises:
            ValueError: the family or a feature is not covered by our decoder; says which.
        """
        family = str(raw.get("model_type"))
        if family not in {"llama", "qwen2", "qwen3", "deepseek_v3"}:
            raise ValueError(f"model_type {family!r} has no decoder of our own")
        _refuse_uncovered(raw)
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        common: dict[str, Any] = {
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_hidden_layers": raw["num_hidden_layers"],
            "num_attention_heads": heads,
            "vocab_size": raw["vocab_size"],
            "rms_norm_eps": float(raw["rms_norm_eps"]),
            "max_position_embeddings": raw["max_position_embeddings"],
            "rope_parameters": RopeParameters.from_hf(raw),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "attention_bias": family == "qwen2" or bool(raw.get("attention_bias", False)),
        }
        if family == "deepseek_v3":
            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
            mla = {key: raw[key] for key in (*keys, "v_head_dim")}
            return cls(
                attention="mla",
                num_key_value_heads=heads,
                head_dim=mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
                rope_interleave=bool(raw.get("rope_interleave", True)),
                **mla,
                **common,
            )
        return cls(
            attention="gqa",
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            qk_norm=family == "qwen3",
            **common,
        )


def _refuse_uncovered(raw: dict[str, Any]) -> None:
    """Features that would give silently wrong logits in our decoder."""
    if raw.get("hidden_act", "silu") not in {"silu", "swish"}:
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not covered")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is not covered")
    if raw.get("attention_bias") and raw["model_type"] in {"llama", "qwen3"}:
        raise ValueError("attention_bias is not covered: it also biases the output projection")
    others = set(raw.get("layer_types") or ()) - {"full_attention"}
    if raw.get("use_sliding_window") or others:
        raise ValueError(f"sliding windows or other layer types are not covered {sorted(others)}")
    if raw.get("quantization_config"):
        raise ValueError("quantized weights are not covered")
    if raw["model_type"] == "deepseek_v3":
        dense = raw.get("first_k_dense_replace") or 0
        if dense < raw["num_hidden_layers"]:
            raise ValueError(f"mixture-of-experts layers from {dense} on are not covered")
