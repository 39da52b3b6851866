"""The verbs around training: teachers, and other tools' training files.

Like `dspark.cli.main`, this module imports neither torch nor transformers at its top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.cli.draft_verbs import Overrides, RecipePath

verbs = typer.Typer()


@verbs.command()
def teach(
    recipe: RecipePath,
    overrides: Overrides = None,
    connect: Annotated[
        str | None,
        typer.Option(metavar="tcp://TRAINER:PORT", help="Rank 0 of the trainer."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Of the trainer.")] = 1,
    name: Annotated[str | None, typer.Option(help="This teacher's own name.")] = None,
) -> None:
    """Be a teacher: stream hidden states to the trainer of this recipe until it has finished."""
    from dspark.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from dspark.cli.context import RunContext
    from dspark.cli.origin import command_line
    from dspark.cli.teachers import run_teacher

    run = RunContext(loaded, command_line())
    run_teacher(run, connect, ranks, name)


@verbs.command("import-config")
def import_config(
    path: Annotated[Path, typer.Argument(metavar="YAML", help="A TorchSpec training file.")],
    out: Annotated[
        Path | None, typer.Option(help="The recipe to write; printed if left out.")
    ] = None,
) -> None:
    """Turn a TorchSpec YAML into a recipe and list what has no counterpart."""
    from dspark.cli.import_config import import_config as convert

    convert(path, out)
