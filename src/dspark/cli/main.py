"""The command ``dspark``: ``dspark VERB RECIPE.yaml key=value``.

This module imports neither torch nor transformers, so ``--help`` answers at once; verbs import what
they need when they run. Errors made on purpose print their four parts and set the exit code;
Ctrl-C says how to resume. A traceback is a bug.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark import __version__
from dspark.artifacts import Kind
from dspark.cli.draft_verbs import Overrides, RecipePath
from dspark.cli.draft_verbs import verbs as draft_verbs
from dspark.cli.running_verbs import verbs as running_verbs
from dspark.cli.train_verbs import verbs as train_verbs
from dspark.errors import DSparkError

app = typer.Typer(
    name="dspark",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, prove and measure DSpark drafts: small models that make large ones decode faster.",
    epilog="Start with: dspark run recipes/quickstart.yaml",
)

Plan = Annotated[
    bool, typer.Option("--plan", help="Print rows, bytes, memory and rough time; run nothing.")
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that belong to no verb."""


def _stages(
    recipe: Path, overrides: list[str] | None, plan: bool, only: Kind | None = None
) -> None:
    from dspark.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from dspark.cli.context import RunContext
    from dspark.cli.origin import command_line

    context = RunContext(loaded, command_line())
    if plan:
        from dspark.cli.plan import print_plan

        print_plan(context, only)
        if only == "draft":
            from dspark.cli.train_plan import print_train_plan

            print_train_plan(context)
        return
    if only is None:
        from dspark.bench.svg import require_plotting

        require_plotting()  # the report comes last, hours later
    try:
        from dspark.cli.pipeline import run_stages

        run_stages(context, only, only=only is not None)
    except KeyboardInterrupt:
        # Every stage writes atomically and keeps what is whole, so there is nothing to clean up.
        typer.echo("\nInterrupted. Run the same command again to resume.", err=True)
        raise typer.Exit(130) from None


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Run every stage, skipping finished ones, and write the report."""
    _stages(recipe, overrides, plan)


@app.command()
def prompts(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe of a run, or of prompts alone."),
    ] = None,
    overrides: Overrides = None,
    input: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Without a recipe: file or folder of prompts."),
    ] = None,
    traffic: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Without a recipe: log of your own requests."),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Evaluation items that prompts must not contain."),
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option(help="Benchmarks of `dspark bench` as well; or: all.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(exists=True, help="Folder with files of those benchmarks.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Without a recipe: folder to write.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Path or hub id: count tokens, compare by tokens too.")
    ] = None,
    scrub: Annotated[
        str | None, typer.Option(help="What is done to traffic: default, none, module:function.")
    ] = None,
    plan: Plan = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make the prompts: recognise, filter, remove duplicates, decontaminate, report."""
    from dspark.cli.loose_prompts import Loose
    from dspark.cli.prompts import run_prompts_verb

    loose = Loose(
        inputs=tuple(input or ()),
        traffic=tuple(traffic or ()),
        against=tuple(against or ()),
        tasks=tuple(tasks or ()),
        data=data,
        out=out,
        tokenizer=tokenizer,
        scrub=scrub,
    )
    run_prompts_verb(
        recipe,
        overrides or [],
        loose,
        plan=plan,
        as_json=as_json,
        run=lambda path, values: _stages(path, values, plan, "prompts"),
    )


@app.command()
def regenerate(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Have the target answer the training prompts itself: embedded, or behind any server."""
    from dspark.cli.answers import run_regenerate_verb

    run_regenerate_verb(
        recipe,
        overrides or [],
        plan=plan,
        run=lambda path, values: _stages(path, values, plan, "answers"),
    )


@app.command()
def capture(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Replay the answers through the target and store its hidden states."""
    _stages(recipe, overrides, plan, "states")


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Prove the states, train the draft and write its checkpoint."""
    _stages(recipe, overrides, plan, "draft")


@app.command()
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE|DRAFT] [KEY=VALUE]...",
            help="A recipe or a draft folder, and settings: bench.max_new_tokens=64, or with a "
            "suite concurrency=8 prompts=32",
        ),
    ] = None,
    plan: Plan = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="JSON Lines of prompts (messages, turns or prompt) for a draft folder.",
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="quick (no network), seed14 or paper9, and both turns.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="One benchmark; repeatable.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Acceptance at 1k to 32k tokens.")] = False,
    base_url: Annotated[
        str | None, typer.Option(help="A server to ask instead of our engine: http://HOST:8000")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As the server names it.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The draft folder, as an option.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, help="Folder of benchmark files; comes before other sources."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Where to write a suite's HTML page.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Another target than a draft folder names: a path, package:NAME or hub id.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a suite's figures as JSON.")
    ] = False,
) -> None:
    """Measure acceptance, identity and speed: a run's prompts, your own, or a suite."""
    from dspark.cli.places import draft_folder, drafts_in

    given = drafts_in(arguments or (), "bench", 1, results=False)
    checkpoint = None if checkpoint is None else draft_folder(checkpoint)
    from dspark.cli.bench_verb import BenchOptions, run_bench

    run_bench(
        BenchOptions(
            tuple(given), plan, prompts, suite, tuple(task or ()), long, base_url, model,
            checkpoint, data, out, page, target, as_json,
        ),
        lambda path, values: _stages(path, values, plan, "bench"),
    )  # fmt: skip


app.add_typer(draft_verbs)
app.add_typer(running_verbs)
app.add_typer(train_verbs)


def _print_error(error: DSparkError) -> None:
    from rich.console import Console

    from dspark.cli.console import print_fault

    console = Console(stderr=True, soft_wrap=True)
    print_fault(console, "Error", error.where, error.expected, error.found, error.fix)


def _called(arguments: list[str] | None) -> Any:
    """The exit status; what typer refuses becomes an error of ours."""
    from dspark.cli.usage import UsageError, usage_error

    try:
        return app(args=arguments, prog_name="dspark", standalone_mode=False)
    except UsageError as error:
        if (ours := usage_error(error)) is None:
            error.show()
            return error.exit_code
        raise ours from None


def entry(arguments: list[str] | None = None) -> Any:
    """Console entry point; returns only through ``SystemExit``."""
    try:
        sys.exit(_called(arguments))
    except DSparkError as error:
        if os.environ.get("DSPARK_TRACEBACK"):
            raise
        _print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    entry()
