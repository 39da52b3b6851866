"""Stages in order: what makes each one's work current, and when it runs.

Each stage's fingerprint covers its recipe section, the target's identity and its parents'
manifests; current work is skipped, interrupted work resumed, and work of another fingerprint moved
aside. What a stage does lives in ``dspark.cli.stages``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.markup import escape

from dspark.artifacts import (
    Kind,
    Parent,
    Stopwatch,
    attempt,
    begin,
    complete,
    completed,
    finish,
    is_current,
    new_manifest,
    parent_of,
    read_manifest,
    run_lock,
    verify,
)
from dspark.cli.context import LEFT_OUT, RunContext, StageResult
from dspark.cli.report import write_report_files
from dspark.cli.stages import RUNNERS, checked_draft_config
from dspark.cli.training import run_draft
from dspark.config.recipe import TrainSection
from dspark.data.identity import section_identity
from dspark.decoding.verify import check_modes
from dspark.errors import ConfigError, MissingArtifactError

ORDER: tuple[Kind, ...] = ("prompts", "answers", "states", "draft", "bench")
PARENTS: dict[Kind, tuple[Kind, ...]] = {
    "prompts": (),
    "answers": ("prompts",),
    "states": ("answers",),
    "draft": ("states",),
    "bench": ("draft", "prompts"),
}
INDIFFERENT = frozenset({"log", "compile", "checkpoint_activations"})
LATER = frozenset(
    {"mode", "order", "stream", "packed", "optimizer", "schedule", "decay_ratio", "ema"}
    | {"decode_every"}
)
CHECKED_FIRST: frozenset[Kind] = frozenset({"prompts", "draft"})
SHOWN_RESULTS = 6
VERBS = {"answers": "regenerate", "states": "capture", "draft": "train"}


def train_identity(section: dict[str, Any]) -> dict[str, Any]:
    """What of the train section decides the draft.

    Where states come by, what is logged and how memory is saved do not. Settings that came later
    and have their usual value are left out, so that drafts from before them stay current.
    """
    usual = TrainSection().model_dump(mode="json")
    kept = {k: v for k, v in section.items() if k not in INDIFFERENT}
    taught = ("taps", "held_rows", "warm_rows")
    for part in (kept, usual):
        part["stream"] = {k: part["stream"][k] for k in taught}
    return {k: v for k, v in kept.items() if k not in LATER or v != usual[k]}


def config_of(run: RunContext, kind: Kind) -> dict[str, Any]:
    """What decides a stage's content, apart from its parents."""
    recipe = run.recipe
    sections: dict[Kind, dict[str, Any]] = {
        "prompts": {"prompts": recipe.prompts},
        "answers": {"regenerate": recipe.regenerate},
        "states": {"capture": recipe.capture},
        "draft": {"draft": recipe.draft, "train": recipe.train},
        "bench": {"bench": recipe.bench},
    }
    plain: dict[str, Any] = {"target": run.identity}
    plain |= {name: part.model_dump(mode="json") for name, part in sections[kind].items()}
    if kind == "draft":
        # What it starts from counts, where that lies does not.
        plain["train"]["init_from"] = run.start_hash
        plain["train"] = train_identity(plain["train"])
        if recipe.train.mode == "online":
            plain["regenerate"] = recipe.regenerate.identity()
        if recipe.train.mode != "offline":
            plain["capture"] = recipe.capture.identity()
    if kind == "prompts":
        plain["prompts"] = section_identity(recipe.prompts, run.task_items)
    if kind == "answers":
        plain["regenerate"] = recipe.regenerate.identity()
    if kind == "states":
        plain["capture"] = recipe.capture.identity()
        ids = recipe.draft.target_layer_ids
        plain["layer_ids"] = None if ids is None else list(ids)
    if kind == "bench":
        plain["workload"] = list(recipe.prompts.workload)
    return plain


def run_stages(run: RunContext, last: Kind | None, *, only: bool) -> None:
    """Run up to ``last`` (None: everything and the report), or ``only`` that stage.

    Raises:
        MissingArtifactError: ``only``, and an earlier stage is unfinished (names the verb).
        BusyError: another process writes into the run's folder.
    """
    # Modes that could not be exact are refused before hours of work, not after.
    bench = run.recipe.bench
    for temperature in bench.temperatures:
        check_modes(bench.verification, bench.draft_sample_method, temperature)
    if run.ranks > 1 and not (only and last == "draft"):
        raise ConfigError(
            expected="one process for every stage but train",
            found=f"{run.ranks} ranks of torchrun",
            where="dspark run" if last is None else f"dspark {VERBS.get(last, last)}",
            fix="Make the other stages with one process, then `torchrun ... -m dspark train`.",
        )
    # The first rank keeps the folder; the others help it.
    with run_lock(run.root) if run.leads else nullcontext():
        _run_in_order(run, last, only=only)


def _run_in_order(run: RunContext, last: Kind | None, *, only: bool) -> None:
    wanted = ORDER if last is None else ORDER[: ORDER.index(last) + 1]
    left_out = LEFT_OUT[run.recipe.train.mode]
    for kind in wanted:
        if kind in left_out and kind != last:
            continue
        if only and kind != last:
            _require(run, kind)
            continue
        _run_stage(run, kind, run_draft if kind == "draft" else RUNNERS[kind])
        if only:
            _show_result(run, kind)
    if last is None:
        run.screen.path("report", write_report_files(run))


def _show_result(run: RunContext, kind: Kind) -> None:
    """Where the artifact's files and subfolders are; of very many only the folder they are in."""
    folder = run.folder(kind)
    names = sorted({name.split("/")[0] for name in read_manifest(folder, kind).files})
    for place in [folder / name for name in names] if len(names) <= SHOWN_RESULTS else [folder]:
        run.screen.path("result", place)


def _require(run: RunContext, kind: Kind) -> None:
    """An earlier stage must be finished, whole, and made by this very recipe."""
    folder, verb = run.folder(kind), VERBS.get(kind, kind)
    fix = f"Run `dspark {verb}` with this recipe first, or `dspark run` for all stages."
    try:
        verify(folder, kind)
    except MissingArtifactError as error:
        raise MissingArtifactError(
            expected=error.expected, found=error.found, where=error.where, fix=fix
        ) from error
    wanted = new_manifest(kind, config_of(run, kind), parents_of(run, kind)).fingerprint
    found = read_manifest(folder, kind).fingerprint
    if found != wanted:
        raise MissingArtifactError(
            expected=f"{kind} made with these settings (fingerprint {wanted[:12]})",
            found=f"{kind} of other settings or another target (fingerprint {found[:12]})",
            where=str(folder),
            fix=fix,
        )


def parent_kinds(run: RunContext, kind: Kind) -> tuple[Kind, ...]:
    """What a stage is made from in the recipe's mode of training."""
    return (run.data_kind,) if kind == "draft" else PARENTS[kind]


def parents_of(run: RunContext, kind: Kind) -> list[Parent]:
    """The finished artifacts that a stage is made from. Raises as :func:`parent_of`."""
    return [parent_of(run.folder(p), p, run.folder(kind)) for p in parent_kinds(run, kind)]


def _run_stage(
    run: RunContext, kind: Kind, runner: Callable[[RunContext, Path], StageResult]
) -> None:
    folder = run.folder(kind)
    manifest = new_manifest(kind, config_of(run, kind), parents_of(run, kind))
    if is_current(folder, manifest.fingerprint):
        run.screen.stage(kind, f"finished before: {folder}")
        return
    if not run.leads:
        runner(run, folder)
        return
    watch = Stopwatch(run.origin, lambda: run.load_seconds)
    if kind in CHECKED_FIRST:
        # Before `begin`, which would move finished work of other settings aside.
        checked_draft_config(run)

    def tell(aside: Path, why: str) -> None:
        run.screen.stage(kind, escape(f"old work moved to {aside} ({why})"))

    begin(folder, manifest, tell)
    with attempt(folder, watch):
        done = completed(folder)
        if done is None:
            result = runner(run, folder)
            done = complete(
                folder,
                counts=result.counts,
                notes=result.notes,
                line=result.line,
                working=result.working,
            )
        with run.screen.bar(f"sealing {kind}", None):
            update = {"counts": done.counts, "notes": done.notes}
            made = finish(folder, manifest.model_copy(update=update), watch).made
    assert made is not None
    tries = f", {len(made.attempts)} attempts" if len(made.attempts) > 1 else ""
    run.screen.stage(kind, f"{done.line} ({made.seconds:.0f} s{tries})")
