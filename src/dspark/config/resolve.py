"""From a recipe's draft section and a known target to a complete draft config.

Rules that need the target (layer ids inside its depth, mask token inside its vocabulary) are
checked here, and their errors carry the recipe's key path like every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig
from dspark.config.layers import default_layer_ids
from dspark.config.recipe import DraftSection
from dspark.errors import ConfigError


@dataclass(frozen=True)
class TargetShape:
    """The few sizes of a target that a draft depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float

    @staticmethod
    def from_hf(raw: dict[str, Any], max_context: int) -> TargetShape:
        """From a Hugging Face text config's ``to_dict()``; the draft sees ``max_context`` tokens.

        Where a family has no such number the usual one stands in: four times the hidden size for
        the MLP, as many key/value heads as heads, hidden size over heads for a head.
        """
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        # A latent target's own head_dim is that of its rotated part alone.
        head_dim = None if raw.get("kv_lora_rank") else raw.get("head_dim")
        return TargetShape(
            hidden_size=hidden,
            intermediate_size=int(raw.get("intermediate_size") or 4 * hidden),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=max_context,
            rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-5),
        )


def layer_ids(section: DraftSection, num_layers: int) -> tuple[int, ...]:
    """The recipe's tapped layers, or five evenly spaced ones."""
    return section.target_layer_ids or default_layer_ids(num_layers)


def draft_config(section: DraftSection, target: TargetShape) -> DraftConfig:
    """Complete and check ``section`` against ``target``.

    Raises:
        ConfigError: names ``draft.<key>``.
    """
    vocabulary = section.vocabulary_size
    if vocabulary is not None and vocabulary > target.vocab_size:
        raise ConfigError(
            expected=f"at most the target's vocabulary of {target.vocab_size}",
            found=str(vocabulary),
            where="draft.vocabulary_size",
            fix="Lower it, or set null to propose any token.",
        )
    try:
        return _config(section, target)
    except ValueError as error:
        message = str(error).split("Value error, ")[-1].split(" [type=")[0].strip()
        known = ("target_layer_ids", "mask_token_id", "qk_rope_head_dim", "hidden_size",
                 "head_dim", "num_key_value_heads", "rope_parameters")  # fmt: skip
        key = next((k for k in known if k in message), "draft")
        raise ConfigError(
            expected="a draft that fits the target",
            found=message,
            where="draft" if key == "draft" else f"draft.{key}",
            fix=f"The target has {target.num_hidden_layers} layers and a vocabulary of "
            f"{target.vocab_size}.",
        ) from error


def differences(wanted: DraftConfig, found: DraftConfig) -> list[str]:
    """What keeps the weights of ``found`` from being those of a draft of ``wanted``.

    The number of positions is left out: it only says where positions are clamped.
    """
    if wanted.flavour != found.flavour:
        return [f"flavour {found.flavour} instead of {wanted.flavour}"]
    have = found.model_dump(mode="json")
    return [
        f"{key} {have[key]} instead of {value}"
        for key, value in wanted.model_dump(mode="json").items()
        if key != "max_position_embeddings" and have[key] != value
    ]


def _config(section: DraftSection, target: TargetShape) -> DraftConfig:
    heads = section.num_attention_heads or target.num_attention_heads
    shared: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": section.intermediate_size or target.intermediate_size,
        "num_hidden_layers": section.num_hidden_layers,
        "num_attention_heads": heads,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": section.rope_parameters,
        "target_layer_ids": layer_ids(section, target.num_hidden_layers),
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_hidden_size": target.hidden_size,
        "mask_token_id": section.mask_token_id,
        "markov_rank": section.markov_rank,
        "markov_head_type": section.markov_head_type,
        "block_size": section.block_size,
    }
    if section.flavour == "qwen3":
        return Qwen3DraftConfig(
            **shared,
            num_key_value_heads=section.num_key_value_heads or target.num_key_value_heads,
            head_dim=section.head_dim or target.head_dim,
        )
    return K3DraftConfig(
        **shared,
        q_lora_rank=section.q_lora_rank,
        kv_lora_rank=section.kv_lora_rank,
        qk_nope_head_dim=section.qk_nope_head_dim,
        qk_rope_head_dim=section.qk_rope_head_dim,
        v_head_dim=section.v_head_dim,
    )
