"""What a draft is: every size and convention that must be equal in training, export and serving.

One frozen schema mirrors the published ``config.json`` (docs/contract.md, section "config.json").
Nothing here imports torch, so ``dspark --help`` and ``dspark inspect`` stay instant.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

MarkovHeadType = Literal["vanilla", "gated", "rnn"]


class Frozen(BaseModel):
    """Unknown keys are refused, types are not coerced and values never change after validation.

    Strict on purpose: ``"3"``, ``true`` or ``3.0`` where an integer belongs is a mistake in a
    recipe, not another spelling. An integer is still a fine float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _lists_become_tuples(cls, data: Any) -> Any:
        # YAML and JSON only have lists; a strict, frozen field only takes a tuple.
        if not isinstance(data, dict):
            return data
        return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


class RopeParameters(Frozen):
    """Rotary embedding of the draft: plain, or YaRN when ``factor`` > 1.

    ``mscale_all_dim`` scales the softmax by ``(0.1 * mscale_all_dim * ln(factor) + 1)^2``.
    """

    rope_type: Literal["default", "yarn"] = "default"
    rope_theta: float = Field(default=10_000.0, gt=0)
    factor: float = Field(default=1.0, ge=1)
    original_max_position_embeddings: PositiveInt | None = None
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float = Field(default=1.0, ge=0)
    mscale_all_dim: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _yarn_is_complete(self) -> RopeParameters:
        if self.rope_type == "yarn" and self.original_max_position_embeddings is None:
            raise ValueError("yarn needs original_max_position_embeddings")
        if self.rope_type == "default" and self.factor != 1.0:
            raise ValueError("factor is only meaningful with rope_type: yarn")
        return self


def check_layer_order(ids: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ids are non-negative and strictly increasing.

    This is what a recipe alone can know; :func:`check_layer_ids` adds the target's depth.
    """
    if not ids:
        raise ValueError("target_layer_ids: at least one tapped layer id is needed")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise ValueError(
            f"target_layer_ids: layer ids must be strictly increasing and unique, found {list(ids)}"
        )
    if ids[0] < 0:
        raise ValueError(f"target_layer_ids: layer id {ids[0]} is negative")


def check_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """Raise ``ValueError`` unless ids are strictly increasing and inside ``[0, num_layers - 2]``.

    The last layer is refused because Hugging Face returns it after the final norm and engines
    before it: no two tools agree on what "layer N-1" holds.
    """
    check_layer_order(ids)
    high = ids[-1]
    if high == num_layers - 1:
        raise ValueError(
            f"target_layer_ids: layer id {high} is the last of {num_layers} layers: Hugging Face "
            "gives it after the final norm and engines before it; the highest usable id is "
            f"{num_layers - 2}"
        )
    if high > num_layers - 2:
        raise ValueError(f"target_layer_ids: layer id {high} is outside [0, {num_layers - 2}]")


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` ids evenly spaced from 1 to ``num_layers - 3``, rounded (contract, section 2).

    Shallow targets that cannot hold ``count`` distinct ids get as many as they can.
    """
    low, high = 1, num_layers - 3
    if high < low:
        return tuple(range(max(num_layers - 1, 0)))[:1]
    if count == 1:
        return (high,)
    step = (high - low) / (count - 1)
    return tuple(sorted({round(low + i * step) for i in range(count)}))


class DraftConfig(Frozen):
    """Sizes and conventions of a K3-flavour draft (MLA latent rows).

    Fields carry the names of the published ``config.json``; :meth:`to_json` adds the aliases that
    engines look for. ``num_target_layers`` there is the number of TAPPED layers, not the depth.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rope_parameters: RopeParameters = RopeParameters()
    target_layer_ids: tuple[int, ...]
    target_num_hidden_layers: PositiveInt
    target_hidden_size: PositiveInt
    mask_token_id: int = Field(ge=0)
    markov_rank: PositiveInt = 256
    markov_head_type: MarkovHeadType = "vanilla"
    block_size: int = Field(default=7, ge=1, le=64)
    sample_from_anchor: Literal[True] = True

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        check_layer_ids(self.target_layer_ids, self.target_num_hidden_layers)
        if self.qk_rope_head_dim % 2:
            raise ValueError("qk_rope_head_dim must be even: RoPE rotates pairs")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} must equal the target's {self.target_hidden_size}:"
                " embedding and lm_head are the target's own"
            )
        return self

    @property
    def row_width(self) -> int:
        """Elements of one cached latent row per layer and token (576 for Kimi-K3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def to_json(self) -> dict[str, Any]:
        """The dictionary written to ``config.json`` (provenance is added by the checkpoint)."""
        own = self.model_dump(mode="json")
        return {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            **own,
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "draft_vocab_size": self.vocab_size,
            "rope_theta": self.rope_parameters.rope_theta,
            "num_target_layers": len(self.target_layer_ids),
            "dspark_noise_token_id": self.mask_token_id,
            "dspark_markov_rank": self.markov_rank,
            "dspark_block_size": self.block_size,
            "dspark_target_layer_ids": list(self.target_layer_ids),
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "dspark_bonus_anchor": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> DraftConfig:
        """Read our own fields back from a ``config.json``; aliases must agree with them.

        Raises:
            ValueError: an alias contradicts its field, or a field is missing or wrong.
        """
        own = {k: raw[k] for k in cls.model_fields if k in raw}
        if "sample_from_anchor" not in raw:
            raise ValueError("sample_from_anchor is missing: the block layout is undeclared")
        config = cls(**own)
        for key, value in config.to_json().items():
            # Our own fields are validated above and may leave defaults out; aliases must agree.
            if key in raw and key not in own and raw[key] != value:
                raise ValueError(f"{key} is {raw[key]!r} but the other fields imply {value!r}")
        return config
