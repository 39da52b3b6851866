"""``dspark import-config``: another tool's training file as a recipe."""

from __future__ import annotations

from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from dspark.artifacts import atomic_write
from dspark.cli.places import require_there
from dspark.config.torchspec import import_torchspec
from dspark.errors import ConfigError


def import_config(path: Path, out: Path | None) -> None:
    """Write (or print) the recipe; say on stderr what has no counterpart or must be filled in.

    Raises:
        ConfigError: not a TorchSpec file, or ``out`` exists.
    """
    require_there(path, "a TorchSpec YAML", "Name the file that TorchSpec's --config takes.")
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

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False, soft_wrap=True)

    say(f"{len(found.left)} keys have no counterpart:")
    for key, value, reason in found.left:
        say(f"  {key} = {value}: {reason}")
    for note in found.notes:
        say(f"note: {note}")
    for key in found.missing:
        say(f"to be filled in: {key}", "bold")
