"""``dspark export``: a finished draft as the folder that engines load and people publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dspark import __version__
from dspark.artifacts import MANIFEST, made_from, read_manifest, require_free
from dspark.bench.results import Summary
from dspark.cli.console import Screen
from dspark.cli.figures import shown_bytes
from dspark.cli.places import draft_folder
from dspark.config.architecture import Flavour
from dspark.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from dspark.checkpoint.card import Figures
    from dspark.checkpoint.export import Exportable


def export_draft(
    source: Path,
    out: Path,
    *,
    to: Flavour,
    dtype: str | None,
    slim: bool,
    max_shard_gb: float | None,
    plan: bool,
) -> None:
    """Export the draft of a run (its folder) or a draft folder into the new folder ``out``.

    Raises:
        CheckpointError: no draft there, an unsound one, or one of another flavour.
        StorageError: not enough room, or not writable.
        ForeignArtifactError: ``out`` holds something.
    """
    folder = draft_folder(source)
    if not plan:
        require_free(out)  # before anything slow
    import torch

    from dspark.checkpoint.card import model_card
    from dspark.checkpoint.export import open_export, write_export

    screen = Screen()
    found = open_export(folder, to)
    kind = None if dtype is None else getattr(torch, dtype)
    figures = figures_of(folder, screen)
    count, total = _sizes(found, kind, slim=slim)
    name = str(kind or found.stored).removeprefix("torch.")
    screen.stage("draft", f"{folder}: {count} tensors, {shown_bytes(total)} in {name}")
    screen.stage("figures", f"{len(figures.rows)} measured rows" if figures else "none measured")
    if plan:
        screen.console.print(Text(f"would write {out}; nothing was written"))
        return
    told = _told(found, figures)
    with screen.byte_bar("writing", total) as on_bytes:
        write_export(
            found,
            out,
            dtype=kind,
            slim=slim,
            told=told,
            card=lambda written: model_card(
                found.config,
                {**found.provenance, **told},
                found.shapes,
                written.files,
                figures,
                name=out.name,
                dtype=name,
                slim=slim,
            ),
            max_shard_bytes=None if max_shard_gb is None else int(max_shard_gb * 1e9),
            on_bytes=on_bytes,
        )
    screen.stage("written", str(out))


def _sizes(found: Exportable, kind: torch.dtype | None, *, slim: bool) -> tuple[int, int]:
    """Tensors and bytes that an export in ``kind`` (None: as they are) writes."""
    from dspark.checkpoint.layout import EMBEDDING
    from dspark.checkpoint.tensorfile import ITEM_BYTES

    entries = [e for n, e in found.weights.entries.items() if not (slim and n == EMBEDDING)]
    sizes = (e.bytes // ITEM_BYTES[e.dtype] * kind.itemsize if kind else e.bytes for e in entries)
    return len(entries), sum(sizes)


def _told(found: Exportable, figures: Figures | None) -> dict[str, Any]:
    """What the export adds to the provenance."""
    from dspark.checkpoint.draft import content_hash

    told: dict[str, Any] = {
        "exported_by": f"dspark {__version__}",
        "exported_from_sha256": content_hash(found.folder),
    }
    if figures is not None:
        expected = found.provenance.get("expected_acceptance", {})
        told["expected_acceptance"] = {**expected, "measured": figures.rows}
    return told


def figures_of(folder: Path, screen: Screen) -> Figures | None:
    """The bench's figures for this very draft, from the run it lies in; None without any.

    The bench's manifest names the draft it measured by hash, so that figures of an earlier draft in
    the same run are never taken for those of this one.
    """
    from dspark.checkpoint.card import Figures

    bench = folder.parent / "bench"
    if not (folder / MANIFEST).is_file() or not (bench / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(bench, "bench")
        rows = json.loads((bench / "results.json").read_text(encoding="utf-8"))
    except (ArtifactError, OSError, ValueError) as error:
        screen.stage("figures", f"left out: {str(error).splitlines()[0]}")
        return None
    if not made_from(manifest, folder):
        screen.stage("figures", "left out: the bench measured another draft")
        return None
    return Figures(rows, _conditions(folder.parent / "summary.json", rows))


def _conditions(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    """How the rows were measured, from the run's summary if it tells of the same rows."""
    try:
        summary = Summary.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    told = summary.model_dump(mode="json")
    if told["results"] != rows:
        return {}
    machine = told["machine"]
    device = machine.get("device") if isinstance(machine, dict) else machine
    found = {
        "workload": told["workload_description"],
        "device": device,
        "target dtype": told["dtype"],
        "verification": told["verification"],
        "drafts sampled": told["draft_sample_method"],
        "commit": told["commit"],
        "command": told["command"],
    }
    return {label: str(text) for label, text in found.items() if text}
