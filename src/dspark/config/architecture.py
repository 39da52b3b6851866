"""What a draft is: every size and convention that must be equal in training, export and serving.

A draft comes in two flavours that differ in their attention and in the names they are published
under. ``k3`` attends over latent rows (MLA), as the Kimi-K3 drafts do; ``qwen3`` over grouped keys
and values, as DeepSpec publishes for ordinary targets and vLLM serves. What both share is
:class:`DraftConfig`; each flavour mirrors its own published ``config.json`` (docs/contract.md,
sections 3 and 9). Nothing here imports torch, so ``dspark --help`` and ``dspark inspect`` stay
instant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from dspark.config.layers import check_layer_ids

Flavour = Literal["k3", "qwen3"]
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

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> RopeParameters:
        """Read a Hugging Face config (``rope_parameters``, or ``rope_theta`` and ``rope_scaling``).

        Raises:
            ValueError: a kind or a switch whose rotation would differ from ours.
        """
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = rope.get("rope_type") or rope.get("type") or "default"
        theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
        if rope.get("partial_rotary_factor") not in {None, 1}:
            raise ValueError("partial_rotary_factor is not covered")
        if kind == "default":
            return cls(rope_theta=theta)
        if kind != "yarn":
            raise ValueError(f"rope_type {kind!r} is not covered")
        if (
            rope.get("factor") is None
            or rope.get("attention_factor")
            or rope.get("truncate") is False
        ):
            raise ValueError(
                "yarn with attention_factor, truncate: false or no factor is not covered"
            )
        mscale, all_dim = (float(rope.get(key) or 0.0) for key in ("mscale", "mscale_all_dim"))
        if bool(mscale) != bool(all_dim):
            # The family's original code and transformers disagree on one without the other.
            raise ValueError("yarn with only one of mscale and mscale_all_dim is not covered")
        if not all_dim:
            # Plain YaRN: rotations scaled by 0.1 ln(factor) + 1, softmax scale as it is.
            mscale = 1.0
        length = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        return cls(
            rope_type="yarn",
            rope_theta=theta,
            factor=float(rope["factor"]),
            original_max_position_embeddings=int(length),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            mscale=mscale,
            mscale_all_dim=all_dim,
        )


class DraftConfig(Frozen, ABC):
    """What every draft has: sizes that follow the target, conventions and heads.

    Fields carry the names of the published ``config.json``; :meth:`to_json` adds what engines
    look for beside them.
    """

    flavour: ClassVar[Flavour]
    architecture: ClassVar[str]
    not_ours: ClassVar[frozenset[str]] = frozenset()
    """Keys that are written for other tools and say nothing about the draft."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
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
    def _fits_the_target(self) -> DraftConfig:
        check_layer_ids(self.target_layer_ids, self.target_num_hidden_layers)
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
    @abstractmethod
    def row_width(self) -> int:
        """Elements of one cached context row per layer and token."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The dictionary written to ``config.json`` (provenance is added by the checkpoint)."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> DraftConfig:
        """Read the flavour that ``architectures`` names back from a ``config.json``.

        On a flavour's own class ``architectures`` is not needed, but must not contradict it.

        Raises:
            ValueError: no known flavour, an undeclared block layout, a missing or wrong field, or
                another key that contradicts the fields.
        """
        chosen = draft_class(raw) if cls is DraftConfig else cls
        if "sample_from_anchor" not in raw:
            raise ValueError("sample_from_anchor is missing: the block layout is undeclared")
        own = {k: raw[k] for k in chosen.model_fields if k in raw}
        own |= chosen._read_rope(raw)
        config = chosen(**own)
        for key, value in config.to_json().items():
            # Our own fields are validated above and may leave defaults out; the rest must agree.
            free = key in own or key in chosen.not_ours
            if key in raw and not free and raw[key] != value:
                raise ValueError(f"{key} is {raw[key]!r} but the other fields imply {value!r}")
        return config

    @classmethod
    def _read_rope(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """``rope_parameters`` as the schema takes it, where ``raw`` says it in another way."""
        return {}

    def _shared_json(self) -> dict[str, Any]:
        return {
            **self.model_dump(mode="json"),
            "hidden_act": "silu",
            "draft_vocab_size": self.vocab_size,
            "rope_theta": self.rope_parameters.rope_theta,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "tie_word_embeddings": False,
        }


class K3DraftConfig(DraftConfig):
    """A draft over latent rows (MLA), published as ``K3DSparkModel``.

    ``num_target_layers`` in its config.json is the number of TAPPED layers, not the depth.
    """

    flavour: ClassVar[Flavour] = "k3"
    architecture: ClassVar[str] = "K3DSparkModel"

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt

    @model_validator(mode="after")
    def _pairs_to_rotate(self) -> K3DraftConfig:
        if self.qk_rope_head_dim % 2:
            raise ValueError("qk_rope_head_dim must be even: RoPE rotates pairs")
        return self

    @property
    def row_width(self) -> int:
        """Latent and shared rotated key: 512 + 64 = 576 for Kimi-K3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "k3_dspark",
            **self._shared_json(),
            "num_key_value_heads": self.num_attention_heads,
            "num_target_layers": len(self.target_layer_ids),
            "dspark_noise_token_id": self.mask_token_id,
            "dspark_markov_rank": self.markov_rank,
            "dspark_block_size": self.block_size,
            "dspark_target_layer_ids": list(self.target_layer_ids),
            "dspark_bonus_anchor": False,
        }


class Qwen3DraftConfig(DraftConfig):
    """A draft over grouped keys and values (GQA), published as ``Qwen3DSparkModel``.

    Its config.json is a Qwen3 config with the draft's fields beside it, as DeepSpec writes it:
    ``num_target_layers`` is the target's depth there, ``num_hidden_layers`` the draft's own.
    """

    flavour: ClassVar[Flavour] = "qwen3"
    architecture: ClassVar[str] = "Qwen3DSparkModel"
    not_ours: ClassVar[frozenset[str]] = frozenset({"num_anchors"})

    num_key_value_heads: PositiveInt
    head_dim: PositiveInt

    @model_validator(mode="after")
    def _heads_and_rope(self) -> Qwen3DraftConfig:
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: RoPE rotates pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} must divide the "
                f"{self.num_attention_heads} query heads"
            )
        rope = self.rope_parameters
        if rope.rope_type == "yarn" and (rope.mscale, rope.mscale_all_dim) != (1.0, 0.0):
            raise ValueError(
                "rope_parameters: engines run a qwen3 draft with plain YaRN only, which is "
                f"mscale 1.0 and mscale_all_dim 0.0, found {rope.mscale} and {rope.mscale_all_dim}"
            )
        return self

    @property
    def row_width(self) -> int:
        """Keys and values of every key/value head."""
        return 2 * self.num_key_value_heads * self.head_dim

    @classmethod
    def _read_rope(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(raw.get("rope_parameters", {}), dict):
            return {}
        return {"rope_parameters": RopeParameters.from_hf(raw)}

    def to_json(self) -> dict[str, Any]:
        rope = self.rope_parameters
        written: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta}
        if rope.rope_type == "yarn":
            # Without mscale keys, which transformers and vLLM read as plain YaRN.
            names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
            written |= {name: getattr(rope, name) for name in names}
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **self._shared_json(),
            "rope_parameters": written,
            "num_target_layers": self.target_num_hidden_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            # DeepSpec's class asserts that its training setting is there.
            "num_anchors": 512,
        }


def draft_class(raw: dict[str, Any]) -> type[DraftConfig]:
    """The flavour's class that a ``config.json`` names in ``architectures``.

    Raises:
        ValueError: no flavour of ours.
    """
    named = raw.get("architectures")
    for chosen in (K3DraftConfig, Qwen3DraftConfig):
        if named == [chosen.architecture]:
            return chosen
    raise ValueError(
        f"architectures is {named!r}; a draft of ours has ['{K3DraftConfig.architecture}'] or "
        f"['{Qwen3DraftConfig.architecture}']"
    )
