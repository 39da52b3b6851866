"""``dspark import-config``: another tool's training file as a recipe."""

from __future__ import annotations

from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.artifacts import atomic_write
from dspark.config.torchspec import import_torchspec
from dspark.errors import ConfigError


def import_config(path: Path, out: Path | None) -> None:
    """Write (or print) the recipe; say on stderr what has no counterpart or must be filled in.

    Raises:
        ConfigError: not a TorchSpec file, or ``out`` exists.
    """
    found = import_torchspec(path)
    text = yaml.safe_dump(found.recipe, sort_keys=False, allow_unicode=True)
    if out is None:
        print(text, end="")
    elif out.exists():
        raise ConfigError(
            expected="a new file",
            found="one that is there",
            where=str(out),
            fix="Name another file, or move this one away.",
        )
    else:
        atomic_write(out, text)
    console = Console(stderr=True)
    table = Table(
        title=Text(f"no counterpart in a recipe ({len(found.left)})"), title_justify="left"
    )
    for column in ("key", "value", "why"):
        table.add_column(column)
    for key, value, reason in found.left:
        table.add_row(Text(key), Text(str(value)), Text(reason))
    console.print(table)
    for note in found.notes:
        console.print(Text(f"note: {note}"), highlight=False)
    for key in found.missing:
        console.print(Text(f"to be filled in: {key}", style="bold"), highlight=False)
