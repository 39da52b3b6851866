"""Layers with a recurrent state instead of cached rows: what a hybrid target's config says of them.

Kimi Delta Attention (KDA; Kimi Linear, arXiv 2510.26692) keeps one matrix per head and the last
inputs of a short convolution, however long the text is. Kimi-K3 has it in 69 of 93 layers, latent
attention without rotary embedding (NoPE MLA) in the others.
"""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, model_validator

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

    ``layers`` are the ids (0-based, ascending) of the layers that have them.
    """

    layers: tuple[int, ...]
    heads: PositiveInt
    head_dim: PositiveInt
    kernel: PositiveInt

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


def usual_names(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with Kimi's own key names translated; other families' dictionaries as they are."""
    if raw.get("model_type") != "kimi_linear":
        return raw
    named = {USUAL_NAMES.get(key, key): value for key, value in raw.items()}
    named["num_key_value_heads"] = named["num_attention_heads"]
    return named


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
