"""``dspark inspect``: manifest, parents and, for a draft, its tensors. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open

from dspark.artifacts import lineage, verify
from dspark.config.load import parse_draft_config
from dspark.errors import ArtifactError, CheckpointError


def _tensors(path: Path) -> dict[str, Any]:
    """Counts of a safetensors file from its header only."""
    try:
        with safe_open(str(path), framework="np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            expected="readable safetensors",
            found=f"{type(error).__name__}: {error}",
            where=str(path),
            fix="Copy the checkpoint again.",
        ) from error
    parameters = 0
    for shape in shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        parameters += size
    return {"tensors": len(shapes), "parameters": parameters}


def describe(path: Path, *, deep: bool) -> dict[str, Any]:
    """Everything ``inspect`` knows about ``path`` as plain JSON."""
    manifest = verify(path, deep=deep)
    out: dict[str, Any] = {"path": str(path), **manifest.model_dump(mode="json")}
    out["bytes"] = sum(entry.bytes for entry in manifest.files.values())
    weights = path / "model.safetensors"
    if weights.exists():
        out |= _tensors(weights)
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        out["row_width"] = parse_draft_config(raw, str(path / "config.json")).row_width
        out["cache_elements_per_token"] = out["row_width"] * raw["num_hidden_layers"]
        out["provenance"] = raw.get("dspark_provenance", {})
    out["lineage"] = [
        {"path": str(where), "state": str(found)}
        if isinstance(found, ArtifactError)
        else {"path": str(where), "kind": found.kind, "fingerprint": found.fingerprint}
        for where, found in lineage(path)
    ]
    return out


def inspect_path(path: Path, *, as_json: bool, deep: bool) -> None:
    """Print :func:`describe` as JSON or as tables."""
    found = describe(path, deep=deep)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(soft_wrap=True)
    table = Table(title=f"{found['kind']} {path}", title_justify="left", show_header=False)
    rows = [
        ("made", f"{found['created']} by {found['tool']} {found['tool_version']}"),
        ("fingerprint", found["fingerprint"]),
        ("files", f"{len(found['files'])}, {found['bytes']:,} bytes"),
        ("checked", "every hash" if deep else "presence and sizes (--deep recomputes hashes)"),
        *((name, f"{count:,}") for name, count in found["counts"].items()),
    ]
    for key in ("tensors", "parameters", "row_width", "cache_elements_per_token"):
        if key in found:
            rows.append((key.replace("_", " "), f"{found[key]:,}"))
    for key, value in {**found["notes"], **found.get("provenance", {})}.items():
        rows.append((key, json.dumps(value) if isinstance(value, (dict, list)) else str(value)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    parents = Table(title="lineage, nearest first", title_justify="left")
    for name in ("path", "kind", "fingerprint or state"):
        parents.add_column(name, overflow="fold")
    for entry in found["lineage"]:
        parents.add_row(
            entry["path"], entry.get("kind", "?"), entry.get("fingerprint", entry.get("state", ""))
        )
    console.print(parents)
