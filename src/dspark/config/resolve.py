"""From a recipe's draft section and a known target to a complete draft config.

Rules that need the target (layer ids inside its depth, mask token inside its vocabulary) are
checked here, and their errors carry the recipe's key path like every other.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.config.architecture import DraftConfig, default_layer_ids
from dspark.config.recipe import DraftSection
from dspark.errors import ConfigError


@dataclass(frozen=True)
class TargetShape:
    """The few sizes of a target that a draft depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float


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
        return DraftConfig(
            hidden_size=target.hidden_size,
            intermediate_size=section.intermediate_size or target.intermediate_size,
            num_hidden_layers=section.num_hidden_layers,
            num_attention_heads=section.num_attention_heads or target.num_attention_heads,
            q_lora_rank=section.q_lora_rank,
            kv_lora_rank=section.kv_lora_rank,
            qk_nope_head_dim=section.qk_nope_head_dim,
            qk_rope_head_dim=section.qk_rope_head_dim,
            v_head_dim=section.v_head_dim,
            rms_norm_eps=target.rms_norm_eps,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_position_embeddings,
            rope_parameters=section.rope_parameters,
            target_layer_ids=layer_ids(section, target.num_hidden_layers),
            target_num_hidden_layers=target.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            mask_token_id=section.mask_token_id,
            markov_rank=section.markov_rank,
            markov_head_type=section.markov_head_type,
            block_size=section.block_size,
        )
    except ValueError as error:
        message = str(error).split("Value error, ")[-1].split(" [type=")[0].strip()
        known = ("target_layer_ids", "mask_token_id", "qk_rope_head_dim", "hidden_size")
        key = next((k for k in known if k in message), "draft")
        raise ConfigError(
            expected="a draft that fits the target",
            found=message,
            where="draft" if key == "draft" else f"draft.{key}",
            fix=f"The target has {target.num_hidden_layers} layers and a vocabulary of "
            f"{target.vocab_size}.",
        ) from error
