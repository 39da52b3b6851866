"""What can be said about one key of a config.json: the small questions that rules are made of.

A predicate takes the raw dictionary and returns what was found when the rule is broken, None when
it holds. Files here may be of any tool, so nothing is assumed about types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dspark.checkpoint.published import PROVENANCE

Raw = Mapping[str, Any]
Broken = Callable[[Raw], str | None]
Flavour = Literal["k3", "qwen3"]

K3_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "target_hidden_size", "markov_rank",
)  # fmt: skip
QWEN3_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "markov_rank",
)  # fmt: skip
KEPT_BF16 = (
    "model.context_proj", "model.layers.93.self_attn.fused_qkv_a_proj",
    "model.markov_head.markov_w2",
)  # fmt: skip
"""Runtime names, as vLLM numbers draft layers, of modules that stay BF16 in an FP8 draft."""


def provenance_of(raw: Raw) -> Mapping[str, Any]:
    """dspark's own block; empty in a file of another tool."""
    block = raw.get(PROVENANCE)
    return block if isinstance(block, dict) else {}


def flavour_of(raw: Raw) -> Flavour:
    """Latent attention or grouped: by the sizes that only one of them has."""
    return "k3" if "kv_lora_rank" in raw or raw.get("model_type") == "k3_dspark" else "qwen3"


def absent(key: str) -> Broken:
    return lambda raw: f"{key} = {raw[key]!r}" if key in raw else None


def equals(key: str, value: Any) -> Broken:
    """Written, and exactly ``value``."""

    def broken(raw: Raw) -> str | None:
        if key not in raw:
            return f"{key} is missing"
        return None if raw[key] == value else f"{key} = {raw[key]!r}"

    return broken


def equals_if_written(key: str, value: Any) -> Broken:
    return lambda raw: f"{key} = {raw[key]!r}" if key in raw and raw[key] != value else None


def same(key: str, other: str) -> Broken:
    """Both keys equal; an alias that is absent is tolerated."""

    def broken(raw: Raw) -> str | None:
        if key not in raw or other not in raw or raw[key] == raw[other]:
            return None
        return f"{key} = {raw[key]!r} but {other} = {raw[other]!r}"

    return broken


def written(keys: tuple[str, ...]) -> Broken:
    def broken(raw: Raw) -> str | None:
        missing = [key for key in keys if raw.get(key) is None]
        return f"missing: {', '.join(missing)}" if missing else None

    return broken


def rope(raw: Raw) -> Mapping[str, Any]:
    """The rotary section under either name; empty when there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            section: Mapping[str, Any] = raw[key]
            return section
    return {}


def is_yarn(raw: Raw) -> bool:
    section = rope(raw)
    kind = section.get("rope_type", section.get("type"))
    # Tuples, not sets: a value of a foreign file need not be hashable.
    return kind in ("yarn", "deepseek_yarn") or section.get("factor") not in (None, 1)


def yarn_has(key: str) -> Broken:
    return lambda raw: (
        f"yarn without {key}" if is_yarn(raw) and rope(raw).get(key) is None else None
    )


def rope_section(raw: Raw) -> str | None:
    if isinstance(raw.get("rope_parameters"), dict):
        return None
    if raw.get("rope_scaling"):
        return "the frequencies under rope_scaling, no rope_parameters"
    return "no rope_parameters"


def one_rope_section(raw: Raw) -> str | None:
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    if not old or not new or old == new:
        return None
    return f"rope_scaling = {old!r} beside rope_parameters = {new!r}"


def attention_factor(raw: Raw) -> str | None:
    value = rope(raw).get("attention_factor")
    return None if value is None else f"attention_factor = {value!r}"


def yarn_length(raw: Raw) -> str | None:
    """Positions beyond the table of original length times factor."""
    section, longest = rope(raw), raw.get("max_position_embeddings")
    original, factor = section.get("original_max_position_embeddings"), section.get("factor")
    numbers = all(isinstance(n, (int, float)) for n in (original, factor, longest))
    if not is_yarn(raw) or not numbers or longest <= original * factor:  # type: ignore[operator]
        return None
    return f"max_position_embeddings = {longest}, the table holds {original} x {factor}"


def default_factor(raw: Raw) -> str | None:
    section = rope(raw)
    if section.get("rope_type") == "default" and section.get("factor") not in (None, 1):
        return f"rope_type default with factor = {section['factor']!r}"
    return None


def tapped_count(raw: Raw) -> str | None:
    ids, count = raw.get("target_layer_ids"), raw.get("num_target_layers")
    if not isinstance(ids, list) or count == len(ids):
        return None
    if count is None:
        return "num_target_layers is missing"
    return f"num_target_layers = {count!r}, {len(ids)} layers tapped"


def architecture(raw: Raw) -> str | None:
    """The registered name of the flavour, with the model_type that belongs to it."""
    wanted = {
        "k3": ("k3_dspark", ["K3DSparkModel"]),
        "qwen3": ("qwen3", ["Qwen3DSparkModel"]),
    }[flavour_of(raw)]
    if (raw.get("model_type"), raw.get("architectures")) == wanted:
        return None
    return f"model_type = {raw.get('model_type')!r}, architectures = {raw.get('architectures')!r}"


def full_attention(raw: Raw) -> str | None:
    kinds = raw.get("layer_types", [])
    if not isinstance(kinds, list):
        return f"layer_types = {kinds!r}"
    others = {str(kind) for kind in kinds} - {"full_attention"}
    if raw.get("use_sliding_window") or others:
        return f"use_sliding_window = {raw.get('use_sliding_window')!r}, {sorted(others)}"
    return None


def quantized_ignores(raw: Raw) -> str | None:
    """Patterns of an FP8 config against the names that vLLM gives modules at run time."""
    section = raw.get("quantization_config")
    if not isinstance(section, dict):
        return None
    ignore = section.get("ignore")
    patterns = [str(p) for p in ignore] if isinstance(ignore, list) else []

    def ignored(name: str) -> bool:
        return any(
            re.match(p.removeprefix("re:"), name) if p.startswith("re:") else p == name
            for p in patterns
        )

    try:
        open_names = [name for name in KEPT_BF16 if not ignored(name)]
    except re.error as error:
        return f"a pattern that is no regular expression: {error}"
    return f"not ignored: {', '.join(open_names)}" if open_names else None
