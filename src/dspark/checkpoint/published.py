"""config.json of a draft, read without assuming anything.

Engines fill absent fields with defaults and pass over fields they do not know, and then draft
rubbish at full speed. So here every field that decides the arithmetic must be written, fields that
some engine would read in another way than we do must be absent, and a field nobody here knows is
refused instead of ignored. Each rule has its own error, because each was somebody's lost week
(docs/contract.md, section 9).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from dspark.checkpoint.foreign import format_of, our_fields
from dspark.checkpoint.quantization import FIELD, ignore_patterns
from dspark.config.architecture import DraftConfig, K3DraftConfig, RopeParameters, draft_class
from dspark.config.load import parse_draft_config, read_json_object
from dspark.errors import CheckpointError, ConfigError

CONFIG = "config.json"
PROVENANCE = "dspark_provenance"

MODEL_TYPES = {"k3": "k3_dspark", "qwen3": "qwen3"}
"""Flavour -> ``model_type``."""

FORBIDDEN = {
    "rope_interleave": "some engines would rotate halves instead of pairs because of it",
    "dflash_config": "it declares the layout of another method, with one more input than slots",
    "eagle_aux_hidden_state_layer_ids": "it counts layers from 1 and would contradict "
    "target_layer_ids",
}
"""Fields that must be absent, and why."""

FIXED: dict[str, Any] = {
    "mla_use_nope": False, "mla_use_output_gate": False, "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
    "logit_scale": 1.0, "rope_scaling": None,
}  # fmt: skip
"""Fields other writers add, with the only value this arithmetic has."""

INERT = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version",
    "use_cache", "initializer_range", "_name_or_path", "_torchspec_version", PROVENANCE,
    FIELD,
})  # fmt: skip
"""Fields that say nothing about the arithmetic of a draft."""


def read_raw(folder: Path) -> dict[str, Any]:
    """The fields of ``folder``'s config.json, unchecked beyond being one JSON object.

    Raises:
        CheckpointError: unreadable, not JSON, a key twice, or no object.
    """
    try:
        return read_json_object(folder / CONFIG, "the config.json of a DSpark draft")
    except ConfigError as error:
        raise _as_checkpoint_error(error) from error


def read_config(folder: Path) -> tuple[DraftConfig, dict[str, Any]]:
    """The draft's config and provenance; formats of ``dspark.checkpoint.foreign`` are converted.

    Raises:
        CheckpointError: absent, unreadable, or breaking one of the rules above; names the field.
    """
    where = str(folder / CONFIG)
    raw = read_raw(folder)
    ours = format_of(raw) == "dspark"
    raw = our_fields(raw, where)
    if ours:
        check_fields(raw, where)
    provenance = raw.get(PROVENANCE, {})
    if not isinstance(provenance, dict):
        found = f"a {type(provenance).__name__}"
        _refuse(where, PROVENANCE, "an object", found, "Export the draft again.")
    try:
        config = parse_draft_config(raw, where)
    except ConfigError as error:
        raise _as_checkpoint_error(error) from error
    if ours:
        _check_known(raw, config, where)
    return config, provenance


def check_fields(raw: dict[str, Any], where: str) -> None:
    """Which fields are there; :func:`read_config` then checks what they say.

    Raises:
        CheckpointError: names the first field at fault and what to do about it.
    """
    try:
        chosen = draft_class(raw)
    except ValueError as error:
        fix = "This is no draft of a kind that dspark knows."
        _refuse(where, "architectures", "an architecture of ours", str(error)[:200], fix)
    kind = MODEL_TYPES[chosen.flavour]
    if raw.get("model_type") != kind:
        found = repr(raw.get("model_type"))[:80]
        fix = "Engines choose the class by either field: both must name the same draft."
        _refuse(where, "model_type", f"{kind!r}, as {chosen.architecture} has", found, fix)
    ignore_patterns(raw, where)
    for key, reason in FORBIDDEN.items():
        if key in raw:
            _refuse(where, key, "no such field", repr(raw[key])[:80], f"Remove it: {reason}.")
    _check_layout(raw, where)
    _check_rope(raw.get("rope_parameters"), chosen, where)
    for key in chosen.model_fields:
        if key not in raw:
            fix = "Write what the draft was trained with; engines would each assume their own."
            _refuse(where, key, "the field", "nothing: it is missing", fix)
    if chosen is K3DraftConfig:
        _check_tap_count(raw, where)
    for key, value in FIXED.items():
        if key in raw and repr(raw[key]) != repr(value):
            fix = "This is a draft of another architecture."
            _refuse(where, key, repr(value), repr(raw[key])[:80], fix)


def _check_known(raw: dict[str, Any], config: DraftConfig, where: str) -> None:
    """Nothing is read over: a field may change the arithmetic of whoever wrote it."""
    unknown = sorted(set(raw) - {*config.to_json(), *FIXED, *INERT})
    if unknown:
        fix = "Remove it if it changes nothing; else this is another kind of draft."
        _refuse(where, unknown[0], "fields that are known", repr(raw[unknown[0]])[:80], fix)


def _check_layout(raw: dict[str, Any], where: str) -> None:
    if "sample_from_anchor" not in raw:
        _refuse(
            where,
            "sample_from_anchor",
            "the block layout to be declared",
            "nothing: it is missing",
            "Write true if slot 0 predicts the token after the anchor (K inputs, K slots).",
        )
    if raw["sample_from_anchor"] is not True:
        _refuse(
            where,
            "sample_from_anchor",
            "true: the anchor is the first of K inputs and slot 0 follows it",
            repr(raw["sample_from_anchor"])[:80],
            "A draft of the fill-in layout (1 + K inputs) is another model; it has to be trained "
            "anew.",
        )


def _check_rope(rope: Any, chosen: type[DraftConfig], where: str) -> None:
    if not isinstance(rope, dict):
        return
    if "attention_factor" in rope:
        fix = "Remove it and write mscale_all_dim: engines multiply by one or by the other."
        found = repr(rope["attention_factor"])[:80]
        _refuse(where, "rope_parameters.attention_factor", "no such field", found, fix)
    needed = ["rope_type", "rope_theta"]
    if rope.get("rope_type") != "default":
        # Plain YaRN, which qwen3 drafts have, is said by leaving both mscale keys out.
        unsaid = set() if chosen is K3DraftConfig else {"mscale", "mscale_all_dim"}
        needed = [key for key in RopeParameters.model_fields if key not in unsaid]
    for key in needed:
        if key not in rope:
            fix = "Write the rotation the draft was trained with; engines differ in their defaults."
            _refuse(where, f"rope_parameters.{key}", "the field", "nothing: it is missing", fix)


def _check_tap_count(raw: dict[str, Any], where: str) -> None:
    """Engines size context_proj by it, and the word invites the target's depth."""
    ids, said = raw.get("target_layer_ids"), raw.get("num_target_layers")
    if not isinstance(ids, list) or said is None or said == len(ids):
        return
    depth = raw.get("target_num_hidden_layers")
    what = "the target's depth" if said == depth else "another number"
    fix = "Write the number of tapped layers; the depth belongs into target_num_hidden_layers."
    expected = f"{len(ids)}, the number of target_layer_ids"
    _refuse(where, "num_target_layers", expected, f"{said!r}: num_target_layers is {what}", fix)


def _as_checkpoint_error(error: ConfigError) -> CheckpointError:
    return CheckpointError(
        expected=error.expected, found=error.found, where=error.where, fix=error.fix
    )


def _refuse(where: str, key: str, expected: str, found: str, fix: str) -> NoReturn:
    raise CheckpointError(expected=expected, found=found, where=f"{where}: {key}", fix=fix)
