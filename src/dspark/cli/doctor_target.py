"""The part of an examination that needs the target: its tokenizer, its sizes, and the live checks.

The acceptance to expect is taken from the bench of the very run that made the draft, when that run
lies beside it (its manifest must name this draft); it was decoded at temperature 0 on the held-out
prompts that are decoded again here. A draft on its own only has the teacher-forced figure of its
provenance (sampled target distribution, all positions), which is compared more leniently.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import made_from, read_manifest
from dspark.checkpoint.draft import is_slim, load_draft
from dspark.checkpoint.layout import EMBEDDING
from dspark.checkpoint.shards import Weights
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.cli.console import Screen
from dspark.cli.doctor_vllm import vllm_engine
from dspark.config.prompts import OrderTicketSource
from dspark.data.chat import end_ids, prompt_ids, template_hash, tokenizer_hash, usable_mask_ids
from dspark.data.shards import read_prompts
from dspark.data.sources import file_prompts, prompts_of
from dspark.doctor.engine import LiveEngine, OwnEngine
from dspark.doctor.files import check_recorded, check_target_facts
from dspark.doctor.findings import Check, failed, skipped
from dspark.doctor.live import Expected, Patient, examine_live, layers_to_tap
from dspark.doctor.predicates import provenance_of
from dspark.doctor.tokens import check_mask
from dspark.doctor.weights import check_embedding, stored
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.errors import ArtifactError, DataError, DSparkError
from dspark.model.draft import DSparkDraft
from dspark.pairing import recorded_section, target_identity

PROMPTS = 16
MASK_TRIALS = 4
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Request:
    """What the user asked: ``target`` None for the offline checks only."""

    folder: Path
    engines: tuple[str, ...]
    target: str | None
    prompts: Path | None


def beside_target(
    request: Request, raw: dict[str, Any], weights: Weights | None, sound: bool, screen: Screen
) -> list[Check]:
    assert request.target is not None
    longest = raw.get("max_position_embeddings")
    section = recorded_section(
        request.folder,
        provenance_of(raw),
        request.target,
        longest=min(longest, DEFAULT_CONTEXT) if isinstance(longest, int) else None,
    )
    with screen.bar(f"loading {request.target}", None):
        target = load_target(section)
    checks = token_checks(raw, target.tokenizer, end_ids(target))
    identity = target_identity(target)
    checks += check_recorded(
        raw, {key: identity[key] for key in ("target_weights_hash", "target_config_hash")}
    )
    facts = {
        k: getattr(target.shape, k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")
    }
    checks += check_target_facts(raw, facts)
    embedding = target.build(()).embedding_weight()
    held = weights is not None and EMBEDDING in weights.entries
    own = stored(weights, EMBEDDING) if held and weights is not None else None
    checks.append(check_embedding(own, embedding))
    fits = all(check.status != "fail" for check in check_target_facts(raw, facts))
    if not sound or not fits:
        why = "the checkpoint cannot be run as it is; mend the failed checks first"
        return [*checks, skipped("live", "the draft beside its target", why)]
    return checks + _live(request, raw, target, screen)


def token_checks(raw: dict[str, Any], tokenizer: Any, ends: frozenset[int]) -> list[Check]:
    usable = usable_mask_ids(tokenizer, _vocabulary(raw), ends)
    mask = raw.get("mask_token_id")
    known = isinstance(mask, int) and mask >= 0
    name = repr(tokenizer.convert_ids_to_tokens(mask)) if known else "no id"
    recorded = {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer) if tokenizer.chat_template else None,
    }
    return [check_mask(raw, usable, name), *check_recorded(raw, recorded)]


def _vocabulary(raw: dict[str, Any]) -> int:
    size = raw.get("vocab_size")
    return size if isinstance(size, int) else 0


def _live(
    request: Request, raw: dict[str, Any], target: LoadedTarget, screen: Screen
) -> list[Check]:
    head = target.build(()).head_weight()
    slim = is_slim(dict(provenance_of(raw)))
    try:
        draft, _ = load_draft(
            request.folder,
            dtype=target.dtype,
            device=target.device,
            head=head,
            # Only where it is needed: another one has its own check, and may still be run.
            embedding=target.build(()).embedding_weight() if slim else None,
        )
    except DSparkError as error:
        return [_not_loaded(raw, error)]
    tapped = layers_to_tap(draft.config.target_layer_ids, target.num_layers)
    prompts = _with_room(probe_prompts(request, target), target.max_context, request)
    with tempfile.TemporaryDirectory() as scratch:
        engine: LiveEngine | None = None
        told: list[Check] = []
        if request.engines == ("vllm",):
            engine, check = vllm_engine(request.folder, raw, target, tapped, Path(scratch))
            told = [check]
        patient = Patient(
            draft=draft,
            target=target.build(tapped),
            engine=engine or _own_engine(draft, target, tapped),
            prompts=prompts,
            masks=_other_masks(draft.config.mask_token_id, target),
            expected=expected_acceptance(request, raw),
        )
        with screen.bar("prompts and conventions", None) as bar:
            return told + examine_live(patient, lambda: bar.advance())


def _own_engine(draft: DSparkDraft, target: LoadedTarget, tapped: tuple[int, ...]) -> OwnEngine:
    model, ends = target.build(draft.config.target_layer_ids), end_ids(target)
    # Not packed: packing replaces modules, and the probe reads their weights.
    drafter = Drafter(draft, model.head_weight(), pack=False)
    return OwnEngine(
        target.build(tapped), Decoder(model, drafter, ends), Decoder(model, None, ends)
    )


def _not_loaded(raw: dict[str, Any], error: DSparkError) -> Check:
    asked = "dspark's own strict loader takes the checkpoint"
    if "quantization_config" in raw:
        return skipped("live.load", asked, f"quantized drafts are not run here yet: {error.found}")
    return failed(
        "live.load", asked, error.found, f"{error.where}: expected {error.expected}", error.fix
    )


def _other_masks(declared: int, target: LoadedTarget) -> dict[int, str]:
    """Ids that are mistaken for MASK: reserved ones, and pad, bos, eos and unk."""
    tokenizer = target.tokenizer
    found = {
        int(i): name
        for name in ("pad", "bos", "eos", "unk")
        if (i := getattr(tokenizer, f"{name}_token_id")) is not None
    }
    reserved = usable_mask_ids(tokenizer, target.shape.vocab_size, end_ids(target))
    found = {**dict(list(reserved.items())[:MASK_TRIALS]), **found}
    return {i: name for i, name in found.items() if i != declared}


def _run_folder(folder: Path) -> Path | None:
    """The run this draft is part of: its bench names this very draft."""
    bench = folder.resolve().parent / "bench"
    try:
        return bench.parent if made_from(read_manifest(bench, "bench"), folder) else None
    except (ArtifactError, OSError):
        return None


def probe_prompts(request: Request, target: LoadedTarget) -> list[list[int]]:
    """The user's prompts, else the run's held-out ones, else order tickets.

    Of a run only the workload's: that is what the expected acceptance length was measured on.
    """
    if request.prompts is not None:
        chosen = [q.messages for q in file_prompts(request.prompts)][:PROMPTS]
    elif _run_folder(request.folder) is not None:
        chosen = held_out_prompts(request.folder)[:PROMPTS]
    else:
        source = OrderTicketSource(kind="order_tickets", held_out=PROMPTS, seed=1)
        chosen = [q.messages for q in prompts_of(source)]
    return [prompt_ids(target.tokenizer, messages) for messages in chosen]


def _with_room(prompts: list[list[int]], context: int, request: Request) -> list[list[int]]:
    """``prompts``, once each is known to leave room for an answer, in whichever engine."""
    for number, ids in enumerate(prompts, 1):
        if len(ids) >= context:
            raise DataError(
                expected=f"prompts of at most {context - 1} tokens: the context is {context}",
                found=f"{len(ids)} tokens in prompt {number}",
                where=str(request.prompts or request.folder),
                fix="Leave it out, or name other prompts with --prompts FILE.",
            )
    return prompts


def held_out_prompts(folder: Path) -> list[list[dict[str, Any]]]:
    """Messages of the workload that the draft's run kept from training; none without a run."""
    run = _run_folder(folder)
    if run is None:
        return []
    workload = read_manifest(run / "prompts", "prompts").config["prompts"]["workload"]
    held = read_prompts(run / "prompts", "held_out")
    return [q.messages for q in held if q.category in workload]


def expected_acceptance(request: Request, raw: dict[str, Any]) -> Expected | None:
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
