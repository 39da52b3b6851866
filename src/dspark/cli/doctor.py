"""``dspark doctor``: put a checkpoint, and its target when given, before the doctor.

This module asks what the folder alone can answer, in an order in which one fault does not hide the
next; ``dspark.cli.doctor_target`` asks what needs the target. The questions themselves are in
``dspark.doctor``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.foreign import format_of, our_fields
from dspark.checkpoint.layout import meta_draft, tensor_shapes
from dspark.checkpoint.pretrained import read_tokenizer
from dspark.checkpoint.published import CONFIG
from dspark.checkpoint.shards import Weights
from dspark.checkpoint.source import find_target
from dspark.cli.console import Screen
from dspark.cli.doctor_target import Request, beside_target, token_checks
from dspark.config.architecture import DraftConfig
from dspark.config.faults import unknown_choice
from dspark.config.load import parse_draft_config
from dspark.doctor.files import check_config, check_sealed, check_trained, read_raw
from dspark.doctor.findings import Check, Examination, failed, passed, skipped
from dspark.doctor.predicates import provenance_of
from dspark.doctor.rules import ENGINES, check_rules, layer_id_table
from dspark.doctor.weights import (
    check_files,
    check_frequencies,
    check_tensors,
    check_values,
    open_checked,
)
from dspark.errors import CheckpointError, ConfigError, DSparkError

SCHEMA = "config.json parses as a draft, and its aliases agree with its fields"


def examine(request: Request, screen: Screen) -> Examination:
    """Ask every question that can be asked.

    Raises:
        TargetError: ``target`` cannot be loaded.
        DataError: ``prompts`` cannot be read, or one leaves no room for an answer.
    """
    raw, first = read_raw(request.folder)
    exam = Examination(str(request.folder), request.engines)
    exam.add(first)
    if not raw:
        return exam
    exam.add(check_sealed(request.folder))
    raw, foreign, known = _as_ours(raw, request.folder)
    exam.add(known)
    if known.status == "fail":
        return exam
    ids = raw.get("target_layer_ids")
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        exam.layer_ids = layer_id_table(ids)
    exam.add(*check_config(raw), *check_trained(raw))
    exam.add(*check_rules(raw, request.engines))
    config, schema = _parse(raw)
    exam.add(schema)
    weights, opened = open_checked(request.folder)
    exam.add(opened)
    if weights is not None and foreign:
        exam.add(_convertible(request.folder))
    elif weights is not None and config is not None:
        exam.add(*_tensor_checks(weights, config, raw))
    if request.target is None:
        exam.add(*_tokens_offline(raw))
        exam.add(skipped("live", "the draft beside its target", "no --target was given"))
    else:
        exam.add(*beside_target(request, raw, weights, exam.sound, screen))
    return exam


def _as_ours(raw: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bool, Check]:
    """The config in our own words, whether another tool wrote it, and the check about that.

    Rules are asked of the converted form: what DeepSpec leaves out is known of it.
    """
    asked = "config.json is of a format that is known"
    try:
        kind = format_of(raw)
        converted = our_fields(raw, str(folder / CONFIG))
    except CheckpointError as error:
        return raw, True, failed(
            "files.format", asked, f"{error.where}: {error.found}",
            f"{error.expected} is needed to run it as a DSpark draft", error.fix,
        )  # fmt: skip
    return converted, kind != "dspark", passed("files.format", asked, kind)


def _convertible(folder: Path) -> Check:
    """Another tool's tensors, by loading them: the converter knows what must be there."""
    asked = "the weights convert to exactly the tensors of the config"
    try:
        load_draft(folder)
    except DSparkError as error:
        return failed("weights.names", asked, error.found, f"expected {error.expected}", error.fix)
    return passed("weights.names", asked, "converted, every value finite")


def _parse(raw: dict[str, Any]) -> tuple[DraftConfig | None, Check]:
    try:
        config = parse_draft_config(raw, CONFIG)
    except ConfigError as error:
        return None, failed(
            "config.schema", SCHEMA, error.found,
            "a field is missing, of a wrong type or contradicted",
            "Restore the config.json that came with the weights, or export again.",
        )  # fmt: skip
    return config, passed("config.schema", SCHEMA, "every field")


def _tensor_checks(weights: Weights, config: DraftConfig, raw: dict[str, Any]) -> list[Check]:
    draft = meta_draft(config)
    shapes = tensor_shapes(config)
    exact = draft.rotation(torch.tensor([1], device="cpu"))[0].angle().double().tolist()
    return [
        *check_tensors(weights.entries, shapes, raw),
        check_files(weights, raw),
        check_values(weights, shapes),
        check_frequencies(weights, exact),
    ]


def _tokens_offline(raw: dict[str, Any]) -> list[Check]:
    """Tokenizer questions, when provenance names a target whose files are on this machine."""
    provenance = provenance_of(raw)
    source = provenance.get("target_path") or provenance.get("target")
    asked = "mask_token_id is a reserved id of the target's tokenizer"
    if not isinstance(source, str) or not source:
        return [skipped("tokens.mask", asked, "provenance names no target; give --target")]
    try:
        files = find_target(source)
        if not Path(files.location).is_dir():
            return [skipped("tokens.mask", asked, f"{source} is not on this machine")]
        tokenizer = read_tokenizer(files)
    except DSparkError as error:
        return [skipped("tokens.mask", asked, f"{error.found}; give --target")]
    return token_checks(raw, tokenizer, frozenset())


def chosen_engines(engine: str | None) -> tuple[str, ...]:
    """One engine, or all of them.

    Raises:
        ConfigError: an engine without recorded rules.
    """
    if engine is None:
        return ENGINES
    if engine not in ENGINES:
        more = "Leave it out to check against all of them."
        raise unknown_choice(engine, ENGINES, "dspark doctor --engine", more)
    return (engine,)
