"""``dspark leaderboard``: docs/benchmarks.md from the measured results of suites."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from dspark.artifacts import atomic_write
from dspark.bench.figures.leaderboard import render_leaderboard
from dspark.bench.figures.schema import SCHEMA
from dspark.cli.suite_bench import read_suite
from dspark.errors import ConfigError


def write_leaderboard(results: Path, out: Path, *, check: bool = False) -> bool:
    """Write the page, or say with ``check`` whether it is current.

    Returns:
        False when it was to be checked and is another one.

    Raises:
        ConfigError: no such folder.
        ArtifactError: a file that says it is a suite's results, and is not.
    """
    if not results.is_dir():
        raise ConfigError(
            expected="a folder of results",
            found="another file" if results.exists() else "no such file or folder",
            where=str(results),
            fix="Measure first: dspark bench DRAFT --suite quick --out FOLDER/NAME.json",
        )
    found = {p.name: read_suite(p) for p in sorted(results.glob("*.json")) if _is_suite(p)}
    page = render_leaderboard(found)
    if check:
        current = out.is_file() and out.read_text(encoding="utf-8") == page
        typer.echo(f"{out}: {'current' if current else 'not current'}")
        return current
    atomic_write(out, page)
    typer.echo(f"{out}: {len(found)} results")
    return True


def _is_suite(path: Path) -> bool:
    """Other benchmarks write into the same folder."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("schema") == SCHEMA
