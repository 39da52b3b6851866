"""What a target is, as far as a draft and our own decoder need to know: sizes of its config.json.

:class:`TargetShape` is the little a draft depends on. A recipe may write it down
(``target.sizes``), which lets plan, init and inspect work where the target's files are not; the
real target is checked against it when it is loaded (:func:`check_shape`).

``TargetConfig.from_hf`` covers the Llama / Qwen2 / Qwen3 / SmolLM family (GQA), the kind of
DeepSeek-V3 and Kimi-K2 (MLA; dense and mixture-of-experts layers), Kimi Linear (KDA and MLA
without rotary embedding) and the text model of Kimi-K3. Anything else is a ``ValueError`` naming
the reason; such targets run through the transformers adapter (``dspark.model.hf_target``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, model_validator

from dspark.config.architecture import Frozen, RopeParameters
from dspark.config.hybrid import (
    LinearConfig,
    SituConfig,
    dense_layers,
    k3_fields,
    linear_layers,
    usual_names,
)
from dspark.errors import ConfigError

UNBOUNDED = 1 << 30  # positions of a target whose config names no limit


class TargetShape(Frozen):
    """The few sizes of a target that a draft depends on, named as in its config.json.

    Left out, ``num_key_value_heads`` is the number of heads and ``head_dim`` hidden size over
    heads. ``parameters`` and ``active_parameters`` (per token, of a mixture of experts) are only
    for ``--plan``: rounded figures will do and nothing checks them.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = Field(gt=0)
    parameters: PositiveInt | None = None
    active_parameters: PositiveInt | None = None
    _longest: int | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _usual_heads(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
        if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0):
            return data
        return {"num_key_value_heads": heads, "head_dim": hidden // heads, **data}

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TargetShape:
        """From a Hugging Face text config's ``to_dict()``.

        Where a family has no such number the usual one stands in: four times the hidden size for
        the MLP, as many key/value heads as heads, hidden size over heads for a head.
        """
        raw = usual_names(raw)
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        # A latent target's own head_dim is that of its rotated part alone.
        head_dim = None if raw.get("kv_lora_rank") else raw.get("head_dim")
        return cls(
            hidden_size=hidden,
            intermediate_size=int(raw.get("intermediate_size") or 4 * hidden),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw.get("max_position_embeddings") or UNBOUNDED),
            rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-5),
        )

    def within(self, max_context: int) -> TargetShape:
        """The shape of the same target run with at most ``max_context`` positions."""
        own = self.max_position_embeddings
        shape = self.model_copy(update={"max_position_embeddings": min(own, max_context)})
        shape._longest = own if max_context < own < UNBOUNDED else None
        return shape

    @property
    def longest(self) -> int:
        """The target's own positions, which a draft may be served at however short it trained."""
        return self._longest or self.max_position_embeddings


def check_shape(written: TargetShape | None, real: TargetShape) -> None:
    """Compare a recipe's ``target.sizes`` with the target that was really loaded.

    Raises:
        ConfigError: names ``target.sizes.<key>`` of the first difference.
    """
    if written is None:
        return
    for key, value in real.model_dump(exclude={"parameters", "active_parameters"}).items():
        said = getattr(written, key)
        if said != value:
            raise ConfigError(
                expected=f"{value}, which the target itself has",
                found=str(said),
                where=f"target.sizes.{key}",
                fix="Correct the size, or leave target.sizes out: the target's files are here.",
            )


class ExpertConfig(Frozen):
    """A mixture of experts, named as in DeepSeek-V3's config.json.

    With ``routed_expert_hidden_size`` (K3) routed experts work in that smaller width, and their sum
    is normalised (``latent_moe_use_norm``) before it comes back.
    """

    first_k_dense_replace: NonNegativeInt
    n_routed_experts: PositiveInt
    n_shared_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    norm_topk_prob: bool
    routed_scaling_factor: float
    routed_expert_hidden_size: PositiveInt | None = None
    latent_moe_use_norm: bool = False

    @model_validator(mode="after")
    def _reachable(self) -> ExpertConfig:
        size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or size < 2 or self.topk_group > self.n_group:
            raise ValueError(
                f"{self.n_routed_experts} experts in {self.n_group} groups, {self.topk_group} of "
                "them open: groups must be equal and hold two experts at least"
            )
        if self.num_experts_per_tok > size * self.topk_group:
            raise ValueError(
                f"{self.num_experts_per_tok} experts a token of {size * self.topk_group} that are "
                "open to it"
            )
        return self


class TargetConfig(Frozen):
    """Sizes of a decoder-only target. MLA fields are ``None`` for GQA targets, ``experts`` for
    dense ones, ``linear`` without recurrent layers. ``rotary`` off is attention without positions
    (NoPE). The last three are K3's: a sigmoid gate on latent attention's output, the layers of a
    block of attention residuals (``dspark.model.residuals``), and its activation."""

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
    experts: ExpertConfig | None = None
    rotary: bool = True
    linear: LinearConfig | None = None
    output_gate: bool = False
    residual_block: PositiveInt | None = None
    situ: SituConfig | None = None

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Ids of the layers that keep a state instead of rows."""
        return self.linear.layers if self.linear else ()

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The mixture of experts of ``layer``; None where it is dense."""
        if self.experts is None or layer < self.experts.first_k_dense_replace:
            return None
        return self.experts

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TargetConfig:
        """Translate a Hugging Face ``config.to_dict()``.

        Raises:
            ValueError: the family or a feature is not covered by our decoder; says which.
        """
        family = str(raw.get("model_type"))
        raw = usual_names(raw)
        kimi = family in {"kimi_linear", "kimi_k3"}
        if not kimi and family not in {"llama", "qwen2", "qwen3", "deepseek_v3"}:
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
            "rope_parameters": (RopeParameters() if kimi else RopeParameters.from_hf(raw)),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "attention_bias": family == "qwen2" or bool(raw.get("attention_bias", False)),
        }
        if kimi or family == "deepseek_v3":
            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
            mla = {key: raw[key] for key in (*keys, "v_head_dim")}
            return cls(
                attention="mla",
                num_key_value_heads=heads,
                head_dim=mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
                rope_interleave=bool(raw.get("rope_interleave", True)),
                experts=_experts(raw),
                rotary=not kimi,
                linear=linear_layers(raw) if kimi else None,
                **(k3_fields(raw) if family == "kimi_k3" else {}),
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


def _experts(raw: dict[str, Any]) -> ExpertConfig | None:
    if raw["model_type"] in {"kimi_linear", "kimi_k3"}:
        dense = dense_layers(raw)
    else:
        dense = int(raw.get("first_k_dense_replace") or 0)
    if dense >= raw["num_hidden_layers"]:
        return None
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError("moe_layer_freq other than 1 is not covered")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, only) != only:
            raise ValueError(f"{key} {raw[key]!r} is not covered")
    latent = {"routed_expert_hidden_size", "latent_moe_use_norm"}
    names = set(ExpertConfig.model_fields) - {"first_k_dense_replace"} - latent
    found = {name: raw[name] for name in names}
    if raw["model_type"] == "kimi_k3":
        found |= {name: raw[name] for name in latent & set(raw)}
    return ExpertConfig(first_k_dense_replace=dense, **found)


def _refuse_uncovered(raw: dict[str, Any]) -> None:
    """Features that would give silently wrong logits in our decoder."""
    k3 = raw["model_type"] == "kimi_k3"
    if raw.get("hidden_act", "silu") not in {"silu", "swish", *(["situ"] if k3 else [])}:
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not covered")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is not covered")
    if raw.get("attention_bias") and raw["model_type"] in {"llama", "qwen3"}:
        raise ValueError("attention_bias is not covered: it also biases the output projection")
    covered = {"full_attention"}
    if raw["model_type"] in {"kimi_linear", "kimi_k3"}:
        covered = covered | {"linear_attention"}
    others = set(raw.get("layer_types") or ()) - covered
    if raw.get("use_sliding_window") or others:
        raise ValueError(f"sliding windows or other layer types are not covered {sorted(others)}")
    if raw.get("quantization_config"):
        raise ValueError("quantized weights are not covered")
