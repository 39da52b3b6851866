"""Layers with a recurrent state instead of cached rows: what a hybrid target's config says of them.

Kimi Delta Attention (KDA; Kimi Linear, arXiv 2510.26692) keeps one matrix per head and the last
inputs of a short convolution, however long the text is. Kimi-K3 has it in 69 of 93 layers, latent
attention without rotary embedding (NoPE MLA) in the others. What K3 adds to Kimi Linear is told in
``dspark.model.residuals`` and by the fields here.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from dspark.config.architecture import Frozen

# Names of Kimi's config.json that say what other families' names say.
USUAL_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}


class LinearConfig(Frozen):
    """KDA layers: ``heads`` matrices [head_dim, head_dim], convolutions over ``kernel`` tokens.

    ``layers`` are the ids (0-based, ascending) of the layers that have them. Of K3: with
    ``lower_bound`` (negative) a log decay is ``lower_bound * sigmoid(exp(rate) * x)`` instead of
    ``-exp(rate) * softplus(x)``; ``full_rank_gate`` says that the output gate is one whole matrix.
    """

    layers: tuple[int, ...]
    heads: PositiveInt
    head_dim: PositiveInt
    kernel: PositiveInt
    lower_bound: float | None = Field(default=None, lt=0)
    full_rank_gate: bool = False

    @model_validator(mode="after")
    def _usable(self) -> LinearConfig:
        if self.kernel < 2:
            raise ValueError("a short convolution over one token has no state")
        if list(self.layers) != sorted(set(self.layers)) or not self.layers:
            raise ValueError(f"linear layers {list(self.layers)}: at least one, ascending, unique")
        return self

    @property
    def width(self) -> int:
        """Channels of one of q, k, v."""
        return self.heads * self.head_dim


class SituConfig(Frozen):
    """K3's activation: ``beta tanh(gate / beta) sigmoid(gate)`` for ``silu(gate)``, times
    ``linear_beta tanh(up / linear_beta)``, or times ``up`` without ``linear_beta``."""

    beta: float = Field(gt=0)
    linear_beta: float | None = Field(default=None, gt=0)


def usual_names(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with Kimi's own key names translated; other families' dictionaries as they are."""
    if raw.get("model_type") == "kimi_k3":
        raw = _k3_text(raw)
    elif raw.get("model_type") != "kimi_linear":
        return raw
    named = {USUAL_NAMES.get(key, key): value for key, value in raw.items()}
    named["num_key_value_heads"] = named["num_attention_heads"]
    return named


def _k3_text(raw: dict[str, Any]) -> dict[str, Any]:
    """The text part of K3's published config.json under the names of transformers' Kimi Linear."""
    text = {**raw.get("text_config", raw), "model_type": "kimi_k3"}
    linear = text.pop("linear_attn_config", None)
    if linear is None:  # translated before
        return text
    count, dense = text["num_hidden_layers"], text.pop("first_k_dense_replace")
    recurrent = {i - 1 for i in linear["kda_layers"]}  # counted from 1 there
    text["layer_types"] = [
        "linear_attention" if i in recurrent else "full_attention" for i in range(count)
    ]
    text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
    text["linear_num_heads"], text["linear_head_dim"] = linear["num_heads"], linear["head_dim"]
    text["linear_conv_kernel_dim"] = linear["short_conv_kernel_size"]
    text["linear_lower_bound"] = linear.get("gate_lower_bound")
    text["linear_full_rank_gate"] = bool(linear.get("use_full_rank_gate"))
    return text


def k3_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """What K3 has beyond Kimi Linear, as fields of a target's config.

    Raises:
        ValueError: a variant that is not covered.
    """
    if not raw.get("mla_use_nope", True) or raw.get("mla_use_rope"):
        raise ValueError("K3 with rotary embedding is not covered")
    if raw.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise ValueError(f"router {raw['moe_router_activation_func']!r} is not covered")
    situ = None
    if raw["hidden_act"] == "situ":
        situ = SituConfig(
            beta=raw["activation_situ_beta"], linear_beta=raw.get("activation_situ_linear_beta")
        )
    return {
        "output_gate": bool(raw.get("mla_use_output_gate")),
        "residual_block": raw.get("attn_res_block_size"),
        "situ": situ,
    }


def linear_layers(raw: dict[str, Any]) -> LinearConfig | None:
    """From a ``kimi_linear`` config's ``to_dict()``; None when every layer is full attention.

    Raises:
        ValueError: another type of layer, or lists that do not cover the layers.
    """
    kinds = list(raw["layer_types"])
    if len(kinds) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} entries")
    others = set(kinds) - {"linear_attention", "full_attention"}
    if others:
        raise ValueError(f"layer types {sorted(map(str, others))} are not covered")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        return None
    return LinearConfig(
        layers=layers,
        heads=raw["linear_num_heads"],
        head_dim=raw["linear_head_dim"],
        kernel=raw["linear_conv_kernel_dim"],
        lower_bound=raw.get("linear_lower_bound"),
        full_rank_gate=bool(raw.get("linear_full_rank_gate")),
    )


def dense_layers(raw: dict[str, Any]) -> int:
    """How many layers, all of them first, are dense.

    Raises:
        ValueError: dense layers behind a mixture of experts.
    """
    kinds = list(raw["mlp_layer_types"])
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (raw["num_hidden_layers"] - dense):
        raise ValueError("mlp_layer_types other than dense layers first are not covered")
    return dense
