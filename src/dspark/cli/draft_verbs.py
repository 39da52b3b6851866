"""The verbs that take a draft or a target, each independent of the others.

Like `dspark.cli.main`, this module imports neither torch nor transformers at its top.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark.errors import ConfigError

verbs = typer.Typer()

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe YAML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: train.learning_rate=1e-3"),
]


class Dtype(StrEnum):
    """Precision of written weights."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class FlavourName(StrEnum):
    """The two published formats."""

    k3 = "k3"
    qwen3 = "qwen3"


class EmbeddingSource(StrEnum):
    """Where a new draft's embedding is from."""

    auto = "auto"
    target = "target"
    random = "random"


@verbs.command()
def init(
    recipe: RecipePath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the checkpoint.")],
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random start.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of every tensor.")] = Dtype.bfloat16,
    embedding: Annotated[
        EmbeddingSource,
        typer.Option(help="auto: the target's if its files are here, and never a download."),
    ] = EmbeddingSource.auto,
    plan: Annotated[bool, typer.Option("--plan", help="Print sizes; write nothing.")] = False,
) -> None:
    """Write the untrained draft of a recipe, of any size, tensor by tensor."""
    from dspark.cli.init_draft import init_draft

    init_draft(
        recipe,
        out,
        overrides or [],
        seed=seed,
        dtype=dtype.value,
        embedding=embedding.value,
        plan=plan,
    )


@verbs.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DRAFT", help="A run's folder, or a draft folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[
        FlavourName, typer.Option("--to", help="The published format: that of the draft's flavour.")
    ],
    slim: Annotated[bool, typer.Option("--slim", help="Leave the target's embedding out.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of every tensor; left out, as they are.")
    ] = None,
    max_shard_size: Annotated[
        float | None, typer.Option(min=0.001, help="Largest weight file in GB.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Check and print sizes only.")] = False,
) -> None:
    """Write a draft as engines load it: weights, config.json and a model card, all checked."""
    from dspark.cli.export import export_draft

    export_draft(
        source,
        out,
        to=to.value,
        dtype=None if dtype is None else dtype.value,
        slim=slim,
        max_shard_gb=max_shard_size,
        plan=plan,
    )


@verbs.command()
def quantize(
    first: Annotated[
        Path, typer.Argument(metavar="DRAFT|RUN", help="A draft in float, or its run.")
    ],
    second: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the FP8 draft.")],
    recipe: Annotated[
        str, typer.Option(help="phase1, or phase2: also the path of the context rows.")
    ] = "phase1",
    include: Annotated[
        list[str] | None, typer.Option(help="Shell pattern of linears to add; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Shell pattern of linears to keep in float.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="With OUT CHECKPOINT instead: prove that OUT is made of CHECKPOINT."
        ),
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print sizes; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Make an FP8 draft (weights per channel, activations per token), or prove one."""
    from dspark.cli.quantize import check_checkpoint, quantize_checkpoint, refuse_with_check

    if check:
        given = {"--include": include, "--exclude": exclude, "--plan": plan}
        refuse_with_check({name: bool(value) for name, value in given.items()})
        check_checkpoint(first, second, as_json=as_json)
        return
    try:
        quantize_checkpoint(
            first,
            second,
            recipe=recipe,
            include=include or [],
            exclude=exclude or [],
            plan=plan,
            as_json=as_json,
        )
    except KeyboardInterrupt:
        typer.echo("\nInterrupted. Run the same command again to resume.", err=True)
        raise typer.Exit(130) from None


@verbs.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A recipe, a run, an artifact or a draft.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Recompute every hash and read every weight.")
    ] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Show so many random rows of prompts or answers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which random rows.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Path or hub id; the artifact's own when left out.")
    ] = None,
) -> None:
    """Show what a recipe makes or a folder holds, where it came from, and whether it is whole."""
    if rows is not None:
        if as_json or deep:
            raise ConfigError(
                expected="--rows alone: it shows rows only",
                found="--json or --deep with it",
                where="dspark inspect --rows",
                fix="Leave --json and --deep out, or leave --rows out.",
            )
        from dspark.cli.show_rows import inspect_rows

        inspect_rows(path, rows, seed, tokenizer)
        return
    from dspark.cli.inspect import inspect_path

    if not inspect_path(path, as_json=as_json, deep=deep):
        raise typer.Exit(1)


@verbs.command()
def doctor(
    path: Annotated[
        Path, typer.Argument(metavar="DRAFT|RUN", help="A draft checkpoint folder, or a run's.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The target: a folder, .gguf, package: or hub id; adds live checks."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm, atom, sglang or hf; all of them when left out.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, help="JSON Lines of prompts for the live checks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Examine a draft: files, conventions, and how it drafts beside its target."""
    from rich.console import Console

    from dspark.cli.places import folder_to_examine

    path = folder_to_examine(path)
    from dspark.cli.console import Screen
    from dspark.cli.doctor import chosen_engines, examine
    from dspark.cli.doctor_table import show
    from dspark.cli.doctor_target import Request

    request = Request(path, chosen_engines(engine), target, prompts)
    exam = examine(request, Screen(Console(stderr=True)))
    if as_json:
        typer.echo(json.dumps(exam.as_json(), indent=2))
    else:
        show(exam, Console())
    if not exam.sound:
        raise typer.Exit(1)
