"""Puts a run's figures together: ``summary.json``, ``lineage.json`` and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.artifacts import Manifest, atomic_json, lineage, read_manifest
from dspark.bench.report import write_report
from dspark.bench.results import Lineage, LineageEntry, Summary
from dspark.cli.provenance import commit, machine, versions

if TYPE_CHECKING:
    from dspark.cli.context import RunContext

WORKLOADS = {
    "order_tickets": "order messages turned into JSON with three worked examples in the prompt",
    "word_problems": "maths word problems",
    "reasoning_gym": "reasoning-gym tasks",
    "human_eval": "HumanEval functions",
    "mt_bench": "MT-Bench questions",
    "file": "prompts of a local file",
}


def write_report_files(run: RunContext) -> Path:
    """Write the summary, the lineage and ``report.html`` into the run folder."""
    seconds = {
        kind: float(read_manifest(run.folder(kind), kind).notes["seconds"])
        for kind in ("prompts", "answers", "states", "draft", "bench")
    }
    if run.load_seconds:
        seconds["loading"] = round(run.load_seconds, 2)
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
        "versions": versions(),
        "command": run.command,
        "commit": commit(),
        "machine": machine(),
        "verification": run.recipe.bench.verification,
        "draft_sample_method": run.recipe.bench.draft_sample_method,
        "dtype": run.recipe.target.dtype,
        "block_size": run.recipe.draft.block_size,
    }
    summary = Summary.model_validate_json(json.dumps(raw))
    atomic_json(run.root / "summary.json", summary.model_dump(mode="json"))
    atomic_json(run.root / "lineage.json", _lineage(run.folder("bench")).model_dump(mode="json"))
    return write_report(run.root)


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
