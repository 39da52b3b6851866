"""What ``dspark inspect`` says of a run's folder: every stage, how far it is, and what it holds.

A folder cannot know which settings its next run will have, so "stale" here means only that a stage
was made from another parent than the one that lies here now; ``dspark run RECIPE --plan`` compares
with a recipe.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.artifacts import Kind, Manifest, lineage, verify, writer_of
from dspark.artifacts.record import STAGE, read_record
from dspark.cli.places import STAGES
from dspark.errors import ArtifactError, MissingArtifactError

PAGE = "report.html"


def describe_run(root: Path, *, deep: bool) -> dict[str, Any]:
    """The stages of the run in ``root``; ``deep`` recomputes every hash.

    A stage's ``state`` is finished, stale (made from a parent that is not here any more),
    interrupted, running, damaged or missing; ``writer`` is the process at work, if any. ``bytes``
    are those of its files, ``seconds`` those of all its attempts.
    """
    faults: list[dict[str, str]] = []
    writer = writer_of(root)
    stages = [_stage(root / kind, kind, deep, faults) for kind in STAGES]
    for stage in stages:
        if writer is not None and stage["state"] == "interrupted":
            stage |= {"state": "running", "why": ""}
    report = root / PAGE
    return {
        "path": str(root),
        "kind": "run",
        "writer": writer,
        "checked": "every hash" if deep else "presence and sizes",
        "report": str(report) if report.is_file() else None,
        "stages": stages,
        "previous": sorted(path.name for path in root.glob("*.previous-*")),
        "bytes_on_disk": sum(stage["bytes"] for stage in stages),
        "faults": faults,
    }


def _stage(folder: Path, kind: Kind, deep: bool, faults: list[dict[str, str]]) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": kind, "path": str(folder), "state": "missing", "bytes": 0}
    page = folder / PAGE
    out["report"] = str(page) if page.is_file() else None
    try:
        manifest = verify(folder, kind, deep=deep)
    except MissingArtifactError:
        return out | _begun(folder)
    except ArtifactError as error:
        faults.append(
            {"expected": error.expected, "found": error.found, "where": error.where}
            | {"fix": error.fix}
        )
        return out | {"state": "damaged", "bytes": _bytes(folder), "why": error.found}
    out["bytes"] = sum(entry.bytes for entry in manifest.files.values())
    made = manifest.made
    why = _stale(folder, manifest)
    return out | {
        "state": "stale" if why else "finished",
        **({"why": why} if why else {}),
        "created": manifest.created,
        "seconds": None if made is None else made.seconds,
        "fingerprint": manifest.fingerprint,
        "counts": manifest.counts,
    }


def _begun(folder: Path) -> dict[str, Any]:
    """Of a stage without a manifest: whether it was begun, and when it was last at work."""
    record = read_record(folder)
    if record is None:
        return {}
    touched = max(path.lstat().st_mtime for path in [folder / STAGE, *folder.rglob("*")])
    return {
        "state": "interrupted",
        "created": datetime.fromtimestamp(touched, UTC).isoformat(timespec="seconds"),
        "bytes": _bytes(folder),
        "attempts": len(record.attempts),
        "why": "only to be sealed" if record.done else "the same command resumes it",
    }


def _stale(folder: Path, manifest: Manifest) -> str:
    """Which parents are not what this was made from, in words; empty when all are."""
    parents = {os.path.realpath(folder / parent.path): parent.kind for parent in manifest.parents}
    gone = [
        parents[str(place)]
        for place, found in lineage(folder)
        if isinstance(found, ArtifactError) and str(place) in parents
    ]
    return f"made from other {' and '.join(gone)} than here" if gone else ""


def _bytes(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())


def show_run(found: dict[str, Any], console: Console) -> None:
    """A table of the stages, then where the reports are."""
    table = Table(title=Text(f"run {found['path']}"), title_justify="left")
    for name in ("stage", "state", "when", "bytes", "holds"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for stage in found["stages"]:
        held = stage.get("counts", {})
        counts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in held.items())
        table.add_row(
            stage["kind"],
            Text(stage["state"]),
            Text(stage.get("created", "-").replace("T", " ").removesuffix("+00:00")),
            f"{stage['bytes']:,}",
            Text("; ".join(filter(None, [stage.get("why", ""), counts])) or "-"),
        )
    console.print(table)
    pages = [found["report"], *(stage["report"] for stage in found["stages"])]
    told = [("report", page) for page in pages if page]
    told += [("at work", found["writer"])] if found["writer"] else []
    told += [("older", f"{found['path']}/{name}") for name in found["previous"]]
    told.append(("checked", found["checked"]))
    told.append(("settings", "dspark run RECIPE --plan says whether a stage is that of a recipe"))
    for name, text in told:
        console.print(Text(f"{name:>10}", style="bold").append(f"  {text}", style=""))
