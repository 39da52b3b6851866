"""Puts a run's figures together: ``summary.json``, ``lineage.json`` and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.artifacts import Made, Manifest, atomic_json, lineage, read_manifest
from dspark.bench.report import write_report
from dspark.bench.results import Lineage, LineageEntry, Summary
from dspark.cli.context import LEFT_OUT
from dspark.cli.places import STAGES

if TYPE_CHECKING:
    from dspark.cli.context import RunContext

WORKLOADS = {
    "order_tickets": "order messages turned into JSON with three worked examples in the prompt",
    "word_problems": "maths word problems",
    "reasoning_gym": "reasoning-gym tasks",
    "human_eval": "HumanEval functions",
    "mt_bench": "MT-Bench questions",
    "file": "prompts of local files",
    "hub": "prompts of a hub data set",
    "traffic": "logged requests",
}


def write_report_files(run: RunContext) -> Path:
    """Write the summary, the lineage and ``report.html`` into the run folder.

    Everything is read from what the stages recorded, so the files are the same whenever, wherever
    and by whichever version they are written.
    """
    stages = _stage_records(run)
    seconds = {kind: made.seconds for kind, made in stages.items()}
    if loading := round(sum(made.loading for made in stages.values()), 2):
        seconds["loading"] = loading
    rows = json.loads((run.folder("bench") / "results.json").read_text(encoding="utf-8"))
    trained_on = sorted(
        {
            WORKLOADS[s.kind]
            for s in run.recipe.prompts.sources
            if s.category in run.recipe.prompts.workload
        }
    )
    raw: dict[str, Any] = {
        "seconds_total": round(sum(seconds.values()), 2),
        "results": rows,
        "name": run.recipe.name,
        "target": run.recipe.target.source,
        "workload_description": "; ".join(trained_on),
        "stage_seconds": seconds,
        "stages": {kind: made.model_dump(mode="json") for kind, made in stages.items()},
        "verification": run.recipe.bench.verification,
        "draft_sample_method": run.recipe.bench.draft_sample_method,
        "dtype": run.recipe.target.dtype,
        "block_size": run.recipe.draft.block_size,
    }
    if "bench" in stages:
        measured = stages["bench"].model_dump(mode="json")
        raw |= {key: measured[key] for key in ("command", "commit", "machine", "versions")}
    summary = Summary.model_validate_json(json.dumps(raw))
    atomic_json(run.root / "summary.json", summary.model_dump(mode="json"))
    atomic_json(run.root / "lineage.json", _lineage(run.folder("bench")).model_dump(mode="json"))
    return write_report(run.root)


def _stage_records(run: RunContext) -> dict[str, Made]:
    """How each stage was made; artifacts that hold no record of it are named and left out."""
    kinds = [kind for kind in STAGES if kind not in LEFT_OUT[run.recipe.train.mode]]
    found = {kind: read_manifest(run.folder(kind), kind).made for kind in kinds}
    for kind, made in found.items():
        if made is None:
            run.screen.stage("report", f"no record of how {kind} was made: its time is not counted")
    return {kind: made for kind, made in found.items() if made is not None}


def _lineage(folder: Path) -> Lineage:
    """Ancestors of the bench, oldest first."""
    entries = []
    found = {path.name: m for path, m in lineage(folder) if isinstance(m, Manifest)}
    for name, manifest in reversed(found.items()):
        parents = {
            Path(parent.path).name: found[Path(parent.path).name].fingerprint
            for parent in manifest.parents
            if Path(parent.path).name in found
        }
        entries.append(
            LineageEntry(
                artifact=name, kind=manifest.kind, fingerprint=manifest.fingerprint, parents=parents
            )
        )
    return Lineage(artifacts=tuple(entries))
