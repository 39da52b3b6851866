"""``dspark doctor``: put a checkpoint, and its target when given, before the doctor.

This module finds what an examination needs (the target's facts, prompts, the expected acceptance)
and shows what came out. The questions themselves are in ``dspark.doctor``.

The acceptance to expect is taken from the bench of the very run that made the draft, when that run
lies beside it (its manifest must name this draft); it was decoded at temperature 0 on the held-out
prompts that are decoded again here. A draft on its own only has the teacher-forced figure of its
provenance (sampled target distribution, all positions), which is compared more leniently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.artifacts import MANIFEST, read_manifest, sha256_file
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.source import find_target
from dspark.checkpoint.target import LoadedTarget, load_target, load_tokenizer
from dspark.cli.console import Screen
from dspark.cli.stages import end_ids, target_shape
from dspark.config.architecture import DraftConfig
from dspark.config.recipe import OrderTicketSource, TargetSection
from dspark.data.chat import prompt_ids, template_hash, usable_mask_ids
from dspark.data.prompts import read_prompts
from dspark.data.sources import prompts_of
from dspark.doctor.files import (
    check_config,
    check_recorded,
    check_sealed,
    check_target_facts,
    check_trained,
    read_raw,
)
from dspark.doctor.findings import Check, Examination, failed, passed, skipped
from dspark.doctor.predicates import provenance_of
from dspark.doctor.rules import ENGINES, check_rules, layer_id_table
from dspark.doctor.tokens import check_mask
from dspark.doctor.weights import (
    TensorFile,
    check_embedding,
    check_frequencies,
    check_tensors,
    check_values,
    open_weights,
)
from dspark.errors import ArtifactError, CheckpointError, ConfigError, DSparkError

if TYPE_CHECKING:
    from dspark.doctor.live import Expected

PROMPTS = 16
MASK_TRIALS = 8
SCHEMA = "config.json parses as a draft, and its aliases agree with its fields"


@dataclass(frozen=True)
class Request:
    """What the user asked: ``target`` None for the offline checks only."""

    folder: Path
    engines: tuple[str, ...]
    target: str | None
    prompts: Path | None


def examine(request: Request, screen: Screen) -> Examination:
    """Ask every question that can be asked.

    Raises:
        TargetError: ``target`` cannot be loaded.
        DataError: ``prompts`` cannot be read.
    """
    raw, first = read_raw(request.folder)
    exam = Examination(str(request.folder), request.engines)
    exam.add(first)
    if not raw:
        return exam
    ids = raw.get("target_layer_ids")
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        exam.layer_ids = layer_id_table(ids)
    exam.add(check_sealed(request.folder), *check_config(raw), *check_trained(raw))
    exam.add(*check_rules(raw, request.engines))
    config, schema = _parse(raw)
    exam.add(schema)
    weights, opened = open_weights(request.folder)
    exam.add(opened)
    if weights is not None and config is not None:
        exam.add(*_tensor_checks(weights, config, raw))
    if request.target is None:
        exam.add(*_tokens_offline(raw))
        exam.add(skipped("live", "the draft beside its target", "no --target was given"))
    else:
        exam.add(*_with_target(request, raw, weights, exam.sound, screen))
    return exam


def _parse(raw: dict[str, Any]) -> tuple[DraftConfig | None, Check]:
    try:
        config = DraftConfig.from_json(raw)
    except ValueError as error:
        message = " ".join(str(error).split())[:300]
        return None, failed(
            "config.schema", SCHEMA, message, "a field is missing, of a wrong type or contradicted",
            "Restore the config.json that came with the weights, or export again.",
        )  # fmt: skip
    return config, passed("config.schema", SCHEMA, "every field")


def _tensor_checks(weights: TensorFile, config: DraftConfig, raw: dict[str, Any]) -> list[Check]:
    import torch

    from dspark.model.draft import DSparkDraft

    with torch.device("meta"):
        draft = DSparkDraft(config)
    shapes = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    exact = draft.rotation(torch.tensor([1], device="cpu"))[0].angle().double().tolist()
    return [
        *check_tensors(weights.header, shapes, raw),
        check_values(weights, shapes),
        check_frequencies(weights, exact),
    ]


def _tokens_offline(raw: dict[str, Any]) -> list[Check]:
    """Tokenizer questions, when provenance names a target whose files are on this machine."""
    source = provenance_of(raw).get("target")
    asked = "mask_token_id is a reserved id of the target's tokenizer"
    if not isinstance(source, str) or not source:
        return [skipped("tokens.mask", asked, "provenance names no target; give --target")]
    try:
        files = find_target(source)
        if not Path(files.location).is_dir():
            return [skipped("tokens.mask", asked, f"{source} is not on this machine")]
        tokenizer = load_tokenizer(files)
    except DSparkError as error:
        return [skipped("tokens.mask", asked, f"{error.found}; give --target")]
    return _token_checks(raw, tokenizer, frozenset())


def _token_checks(raw: dict[str, Any], tokenizer: Any, ends: frozenset[int]) -> list[Check]:
    usable = usable_mask_ids(tokenizer, _vocabulary(raw), ends)
    mask = raw.get("mask_token_id")
    known = isinstance(mask, int) and mask >= 0
    name = repr(tokenizer.convert_ids_to_tokens(mask)) if known else "no id"
    recorded = {"template_hash": template_hash(tokenizer) if tokenizer.chat_template else ""}
    return [check_mask(raw, usable, name), *check_recorded(raw, recorded)]


def _with_target(
    request: Request, raw: dict[str, Any], weights: TensorFile | None, sound: bool, screen: Screen
) -> list[Check]:
    assert request.target is not None
    section = _section(request.target, raw)
    with screen.bar(f"loading {request.target}", None):
        target = load_target(section)
    checks = _token_checks(raw, target.tokenizer, end_ids(target))
    checks += check_recorded(raw, {"target_weights_hash": target.files.weights_hash()})
    shape = target_shape(target)
    facts = {k: getattr(shape, k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")}
    checks += check_target_facts(raw, facts)
    embedding = target.build(()).embedding_weight()
    held = weights is not None and "embed_tokens.weight" in weights.header
    stored = weights.read("embed_tokens.weight") if held and weights is not None else None
    checks.append(check_embedding(stored, embedding))
    fits = all(check.status != "fail" for check in check_target_facts(raw, facts))
    if not sound or not fits:
        why = "the checkpoint cannot be run as it is; mend the failed checks first"
        return [*checks, skipped("live", "the draft beside its target", why)]
    return checks + _live(request, raw, target, screen)


def _vocabulary(raw: dict[str, Any]) -> int:
    size = raw.get("vocab_size")
    return size if isinstance(size, int) else 0


def _section(source: str, raw: dict[str, Any]) -> TargetSection:
    """``source`` in the precision and context the draft was made with, where that is recorded."""
    provenance = provenance_of(raw)
    names = {"target_dtype": "dtype", "target_max_context": "max_context"}
    recorded = {own: provenance[key] for key, own in names.items() if key in provenance}
    try:
        return TargetSection(source=source, **recorded)
    except ValueError as error:
        raise CheckpointError(
            expected="a target dtype and context length that dspark knows",
            found=str(recorded),
            where="dspark_provenance",
            fix="Correct or delete the two fields in config.json.",
        ) from error


def _live(
    request: Request, raw: dict[str, Any], target: LoadedTarget, screen: Screen
) -> list[Check]:
    from dspark.doctor.live import Patient, examine_live, layers_to_tap
    from dspark.engine.decode import Decoder
    from dspark.engine.drafter import Drafter

    try:
        draft, _ = load_draft(request.folder, dtype=target.dtype, device=target.device)
    except DSparkError as error:
        return [skipped("live", "the draft beside its target", f"not loadable here: {error.found}")]
    ids = draft.config.target_layer_ids
    # Not packed: packing replaces modules, and the probe reads their weights.
    drafter = Drafter(draft, target.build(ids).head_weight(), pack=False)
    ends = end_ids(target)
    model = target.build(ids)
    patient = Patient(
        draft=draft,
        target=target.build(layers_to_tap(ids, target.num_layers)),
        decoder=Decoder(model, drafter, ends),
        plain=Decoder(model, None, ends),
        prompts=_prompts(request, target),
        masks=_other_masks(draft.config.mask_token_id, target),
        expected=_expected(request, raw),
    )
    with screen.bar("prompts and conventions", None) as bar:
        return examine_live(patient, lambda: bar.advance())


def _other_masks(declared: int, target: LoadedTarget) -> dict[int, str]:
    """Ids that are mistaken for MASK: reserved ones, and pad, bos, eos and unk."""
    tokenizer = target.tokenizer
    found = {
        int(i): name
        for name in ("pad", "bos", "eos", "unk")
        if (i := getattr(tokenizer, f"{name}_token_id")) is not None
    }
    reserved = usable_mask_ids(tokenizer, target.vocab_size, end_ids(target))
    found = {**dict(list(reserved.items())[:MASK_TRIALS]), **found}
    return {i: name for i, name in found.items() if i != declared}


def _run_folder(folder: Path) -> Path | None:
    """The run this draft is part of: its bench names this very draft."""
    bench = folder.resolve().parent / "bench"
    try:
        parents = read_manifest(bench, "bench").parents
        own = sha256_file(folder / MANIFEST)[1]
    except (ArtifactError, OSError):
        return None
    return bench.parent if own in {p.manifest_sha256 for p in parents} else None


def _prompts(request: Request, target: LoadedTarget) -> list[list[int]]:
    """The user's prompts, else the run's held-out ones, else order tickets."""
    run = _run_folder(request.folder)
    if request.prompts is not None:
        from dspark.data.jsonl import read_json_lines

        count = len(list(read_json_lines(request.prompts)))
        chosen = _file_prompts(request.prompts, min(count, PROMPTS))
    elif run is not None:
        held = [q for q in read_prompts(run / "prompts" / "prompts.jsonl") if q.split == "held_out"]
        chosen = [q.messages for q in held[:PROMPTS]]
    else:
        source = OrderTicketSource(kind="order_tickets", held_out=PROMPTS, seed=1)
        chosen = [q.messages for q in prompts_of(source)]
    return [prompt_ids(target.tokenizer, messages) for messages in chosen]


def _file_prompts(path: Path, count: int) -> list[list[dict[str, str]]]:
    from dspark.config.recipe import FileSource

    source = FileSource(kind="file", path=str(path), category="file", held_out=count)
    return [q.messages for q in prompts_of(source)]


def _expected(request: Request, raw: dict[str, Any]) -> Expected | None:
    from dspark.doctor.live import Expected

    run = _run_folder(request.folder)
    if run is not None and request.prompts is None:
        rows = json.loads((run / "bench" / "results.json").read_text(encoding="utf-8"))
        for row in rows:
            if row["prompts"] == "workload" and row["temperature"] == 0:
                return Expected(row["acceptance_length"], f"bench of {run.name}", True)
    recorded = provenance_of(raw).get("expected_acceptance")
    tau = recorded.get("teacher_forced_tau") if isinstance(recorded, dict) else None
    if not isinstance(tau, (int, float)):
        return None
    own = request.prompts is not None or run is not None
    return Expected(float(tau), "teacher-forced, from provenance", own)


def chosen_engines(engine: str | None) -> tuple[str, ...]:
    """One engine, or all of them.

    Raises:
        ConfigError: an engine without recorded rules.
    """
    if engine is None:
        return ENGINES
    if engine not in ENGINES:
        raise ConfigError(
            expected=f"one of {', '.join(ENGINES)}",
            found=engine,
            where="dspark doctor --engine",
            fix="Leave it out to check against all of them.",
        )
    return (engine,)
