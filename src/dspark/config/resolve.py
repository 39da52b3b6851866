"""From a recipe's draft section and a known target to a complete draft config.

Rules that need the target (layer ids inside its depth, mask token inside its vocabulary) are
checked here, and their errors carry the recipe's key path like every other.
"""

from __future__ import annotations

from typing import Any

from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig
from dspark.config.layers import default_layer_ids
from dspark.config.recipe import DraftSection
from dspark.config.target import TargetShape
from dspark.errors import ConfigError


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
        "max_position_embeddings": target.longest,
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
