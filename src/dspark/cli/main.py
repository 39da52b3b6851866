"""The command ``dspark``: ``dspark VERB RECIPE.yaml key=value``.

This module imports neither torch nor transformers, so ``--help`` answers at once; verbs import what
they need when they run. Errors made on purpose print their four parts and set the exit code;
Ctrl-C says how to resume. A traceback is a bug.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dspark import __version__
from dspark.artifacts import Kind
from dspark.errors import DSparkError

app = typer.Typer(
    name="dspark",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, prove and measure DSpark drafts: small models that make large ones decode faster.",
    epilog="Start with: dspark run recipes/quickstart.yaml",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe YAML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: train.learning_rate=1e-3"),
]
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
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    from dspark.cli.context import RunContext

    context = RunContext(loaded, command)
    if plan:
        from dspark.cli.plan import print_plan

        print_plan(context, only)
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
def prompts(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Make the prompts: sources, duplicates out, too long ones out, splits apart."""
    _stages(recipe, overrides, plan, "prompts")


@app.command()
def regenerate(recipe: RecipePath, overrides: Overrides = None, plan: Plan = False) -> None:
    """Have the target answer the training prompts itself (on-policy)."""
    _stages(recipe, overrides, plan, "answers")


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
    source: Annotated[
        Path, typer.Argument(metavar="RECIPE|DRAFT", help="A recipe, or a draft checkpoint folder.")
    ],
    overrides: Overrides = None,
    plan: Plan = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON Lines of prompts (messages, turns or prompt) for a draft folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Another target than a draft folder names: a path, package:NAME or hub id.",
        ),
    ] = None,
) -> None:
    """Measure acceptance, identity and speed against the plain arm of the same engine."""
    if source.is_dir():
        from dspark.cli.checkpoint_bench import bench_checkpoint

        bench_checkpoint(source, prompts, out, overrides or [], target, plan=plan)
        return
    for name, value in (("--prompts", prompts), ("--out", out), ("--target", target)):
        if value is not None:
            _refuse_option(name, "a draft folder", source)
    _stages(source, overrides, plan, "bench")


def _refuse_option(option: str, belongs_to: str, source: Path) -> NoReturn:
    from dspark.errors import ConfigError

    raise ConfigError(
        expected=f"{option} with {belongs_to}",
        found=str(source),
        where=f"dspark bench {option}",
        fix=f"Leave {option} out, or name {belongs_to}.",
    )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An artifact or draft folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Recompute every hash.")] = False,
) -> None:
    """Show what an artifact is, where it came from, and whether it is whole."""
    from dspark.cli.inspect import inspect_path

    inspect_path(path, as_json=as_json, deep=deep)


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A draft checkpoint folder.")],
    target: Annotated[
        str | None,
        typer.Option(help="The target: a folder, .gguf, package: or hub id; adds live checks."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm, atom, sglang or hf; all of them when left out.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines of prompts for the live checks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Examine a draft: files, conventions, and how it drafts beside its target."""
    from rich.console import Console

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


@app.command()
def serve(
    checkpoint: Annotated[Path, typer.Argument(metavar="DRAFT", help="A draft folder.")],
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ENGINE ARGS]", help="Passed on to the engine, after --."),
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm or atom.")] = "embedded",
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id; the one in provenance when left out.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the engine's command.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Print the command that serves a draft in vLLM or ATOM (with --plan)."""
    from dspark.cli.serve import plan_serving, show

    show(plan_serving(checkpoint, engine, target, engine_args or [], plan=plan), as_json=as_json)


@app.command()
def generate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFT] [KEY=VALUE]...",
            help="A draft folder, and sampling parameters: temperature=0.7 max_new_tokens=200",
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What to answer; repeatable.")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The target; the draft's own when left out."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Answer prompts with the embedded engine and print text and acceptance."""
    from dspark.cli.generate import generate_text

    folders = [Path(a) for a in arguments or [] if "=" not in a]
    overrides = [a for a in arguments or [] if "=" in a]
    if len(folders) > 1 or not prompt:
        raise typer.BadParameter("one draft folder at most, and at least one --prompt")
    draft = folders[0] if folders else None
    generate_text(draft, target, prompt, overrides, raw=raw, as_json=as_json)


@app.command()
def verify(
    draft: Annotated[
        Path | None, typer.Argument(metavar="[DRAFT]", help="A draft whose greedy texts to check.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The target; the draft's own when left out."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines of prompts for the greedy texts.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Texts per sampled case.")] = 100_000,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Prove that drafting does not change what comes out; fails when a bound is missed."""
    from dspark.cli.verify import verify as prove

    prove(draft, target, prompts, samples, as_json=as_json)


def _print_error(error: DSparkError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    rows = [("Error", error.where), ("expected", error.expected), ("found", error.found)]
    for label, text in [*rows, ("what to do", error.fix)]:
        console.print(
            Text(f"{label:>11}  ", style="bold red" if label == "Error" else "bold"), end=""
        )
        console.print(Text(text))


def entry(arguments: list[str] | None = None) -> Any:
    """Console entry point; returns only through ``SystemExit``."""
    try:
        app(args=arguments, standalone_mode=True)
    except DSparkError as error:
        if os.environ.get("DSPARK_TRACEBACK"):
            raise
        _print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    entry()
