"""``dspark inspect``: what lies at a path. A recipe, a run, an artifact, or anyone's draft.

The description is one JSON object; the tables print what is in it. Paths and names come from
outside and are printed as they are, never read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.artifacts import MANIFEST, STAGE, lineage, verify
from dspark.cli.console import Screen, print_fault
from dspark.cli.places import CONFIG, is_run, require_there
from dspark.errors import ArtifactError, ConfigError

KNOWN = "a recipe (.yaml), or the folder of a run, an artifact or a draft"
FIGURES = (
    "tensors", "parameters", "trainable_parameters", "row_width", "cache_elements_per_token",
    "cache_bytes_per_token",
)  # fmt: skip
FACTS = (
    "name", "target", "flavour", "architecture", "target_layer_ids", "mask_token_id", "block_size",
    "embedding_included",
)  # fmt: skip


def describe(path: Path, *, deep: bool, screen: Screen | None = None) -> dict[str, Any]:
    """Everything ``inspect`` knows about ``path`` as plain JSON.

    Raises:
        ConfigError: a recipe's fault, or a path of nothing that dspark knows.
        ArtifactError: an artifact that is damaged or foreign.
    """
    require_there(path, KNOWN, "Check the path; a checkpoint is named by its folder.")
    if path.is_file() and path.suffix in {".yaml", ".yml"}:
        from dspark.cli.inspect_draft import describe_recipe

        return describe_recipe(path)
    if not path.is_dir():
        raise ConfigError(
            expected=KNOWN,
            found="another file",
            where=str(path),
            fix="Check the path; a checkpoint is named by its folder.",
        )
    if (path / MANIFEST).exists() or (path / STAGE).exists():
        return _describe_artifact(path, deep=deep, screen=screen)
    if is_run(path) and not (path / CONFIG).exists():
        from dspark.cli.inspect_run import describe_run

        return describe_run(path, deep=deep)
    from dspark.cli.inspect_draft import describe_checkpoint, is_checkpoint

    if is_checkpoint(path):
        return describe_checkpoint(path, deep=deep, screen=screen)
    raise ConfigError(
        expected="an artifact, a run's folder, a draft checkpoint or a recipe (.yaml)",
        found="a folder that is neither: no manifest.json, no stages, no config.json",
        where=str(path),
        fix="Name a run's output folder, one of its stages, or the folder of a draft.",
    )


def _describe_artifact(path: Path, *, deep: bool, screen: Screen | None) -> dict[str, Any]:
    manifest = verify(path, deep=deep)
    out: dict[str, Any] = {"path": str(path), **manifest.model_dump(mode="json")}
    out["bytes_on_disk"] = sum(entry.bytes for entry in manifest.files.values())
    if manifest.kind == "draft":
        from dspark.cli.inspect_draft import describe_checkpoint

        found = describe_checkpoint(path, deep=deep, screen=screen)
        out |= {key: value for key, value in found.items() if key not in out}
    out["lineage"] = [
        {"path": str(where), "state": str(found)}
        if isinstance(found, ArtifactError)
        else {"path": str(where), "kind": found.kind, "fingerprint": found.fingerprint}
        for where, found in lineage(path)
    ]
    return out


def inspect_path(path: Path, *, as_json: bool, deep: bool) -> bool:
    """Print :func:`describe` as JSON or as tables; False when faults were found."""
    if as_json:
        found = describe(path, deep=deep)
        print(json.dumps(found, indent=2))
        return not found.get("faults")
    console = Console(soft_wrap=True)
    found = describe(path, deep=deep, screen=Screen(console))
    if found["kind"] == "run":
        from dspark.cli.inspect_run import show_run

        show_run(found, console)
        return _without_faults(found, console)
    tables = [_facts(found, deep)]
    if found.get("modules"):
        modules = [(m["name"], f"{m['tensors']}", f"{m['parameters']:,}") for m in found["modules"]]
        tables.append(_table("modules", ("module", "tensors", "parameters"), modules, right=(1, 2)))
    if found.get("engines"):
        tables.append(_engines(found["engines"]))
    if found.get("lineage"):
        parents = [
            (e["path"], e.get("kind", "?"), e.get("fingerprint", e.get("state", "")))
            for e in found["lineage"]
        ]
        columns = ("path", "kind", "fingerprint or state")
        tables.append(_table("lineage, nearest first", columns, parents))
    for table in tables:
        console.print(table)
    return _without_faults(found, console)


def _without_faults(found: dict[str, Any], console: Console) -> bool:
    for fault in found.get("faults", []):
        print_fault(console, "Fault", **fault)
    return not found.get("faults")


def _facts(found: dict[str, Any], deep: bool) -> Table:
    rows: list[tuple[str, str]] = []
    if "fingerprint" in found:
        count = len(found["files"])
        rows += [
            ("made", f"{found['created']} by {found['tool']} {found['tool_version']}"),
            ("fingerprint", found["fingerprint"]),
            ("files", f"{count}, {found['bytes_on_disk']:,} bytes"),
            ("checked", "every hash" if deep else "presence and sizes (--deep recomputes hashes)"),
            *((name, f"{count:,}") for name, count in found["counts"].items()),
        ]
    elif found["kind"] == "checkpoint":
        checked = "every number" if deep else "headers and config (--deep reads every number)"
        rows.append(("checked", checked))
    rows += [(key.replace("_", " "), _show(found[key])) for key in FACTS if key in found]
    rows += [(key.replace("_", " "), f"{found[key]:,}") for key in FIGURES if key in found]
    rows += [(f"bytes in {dtype}", f"{n:,}") for dtype, n in found.get("bytes", {}).items()]
    extra = {**found.get("notes", {}), **found.get("provenance", {})}
    rows += [(key, _show(value)) for key, value in extra.items()]
    return _table(f"{found['kind']} {found['path']}", None, rows)


def _engines(views: list[dict[str, Any]]) -> Table:
    rows = []
    for view in views:
        ids = ", ".join(map(str, view["layer_ids"]))
        passed = "\n".join(view["ignores"]) or "-"
        rows.append((view["engine"], view["served"], f"{ids}\n({view['counting']})", passed))
    return _table("engines", ("engine", "served", "layer ids it counts", "passes over"), rows)


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def _table(
    title: str,
    columns: tuple[str, ...] | None,
    rows: Iterable[tuple[str, ...]],
    right: tuple[int, ...] = (),
) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=columns is not None)
    for number, name in enumerate(columns or ()):
        table.add_column(name, overflow="fold", justify="right" if number in right else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
