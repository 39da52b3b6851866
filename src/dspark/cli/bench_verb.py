"""What ``dspark bench`` was asked for: a run's bench stage, a draft on some prompts, or a suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.bench.figures.schema import SuiteResults
from dspark.bench.figures.tables import card_rows, detail_rows
from dspark.cli.checkpoint_bench import bench_checkpoint
from dspark.cli.console import Screen
from dspark.cli.suite_bench import SuiteRequest, as_json, bench_suite
from dspark.errors import ConfigError


@dataclass(frozen=True)
class BenchOptions:
    """The verb's options as they were typed."""

    arguments: tuple[str, ...]
    plan: bool
    prompts: Path | None
    suite: str | None
    tasks: tuple[str, ...]
    long: bool
    base_url: str | None
    model: str | None
    checkpoint: Path | None
    data: Path | None
    out: Path | None
    page: Path | None
    target: str | None
    as_json: bool


SUITE_ONLY = ("suite", "tasks", "long", "base_url", "model", "data", "page", "as_json")


def run_bench(options: BenchOptions, stage: Callable[[Path, list[str]], None]) -> None:
    """Do what was asked; ``stage`` runs a recipe's bench stage.

    Raises:
        ConfigError: options that do not go together. Else as the three ways of measuring do.
    """
    sources, overrides = split_arguments(options.arguments)
    if options.checkpoint is not None:
        sources.append(str(options.checkpoint))
    if len(sources) + (options.base_url is not None) != 1:
        raise ConfigError(
            expected="one thing to measure: a recipe, a draft folder, or --base-url URL",
            found=" and ".join([*sources, *filter(None, [options.base_url])]) or "none",
            where="dspark bench",
            fix="For example: dspark bench DRAFT --suite quick",
        )
    source = Path(sources[0]) if sources else None
    wants_suite = bool(options.suite or options.tasks or options.long)
    if source is not None and not wants_suite:
        _refuse(options, [n for n in SUITE_ONLY if n not in {"suite", "tasks", "long"}], "--suite")
        if source.is_dir():
            with resumable(options.out):
                bench_checkpoint(
                    source, options.prompts, options.out, overrides, options.target,
                    plan=options.plan,
                )  # fmt: skip
            return
        _refuse(options, ["prompts", "out", "target"], "a draft folder")
        stage(source, overrides)
        return
    _refuse(options, ["prompts"], "a draft folder and without a suite")
    if source is not None and not source.is_dir():
        raise ConfigError(
            expected="a draft folder with --suite, --task or --long",
            found=str(source),
            where="dspark bench",
            fix="Name the folder of a checkpoint, such as runs/NAME/draft.",
        )
    _suite(options, source, overrides, wants_suite)


@contextmanager
def resumable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = (
            "Run the same command again to resume."
            if out
            else "Nothing was kept: with --out FILE the same command would resume."
        )
        typer.echo(f"\nInterrupted. {kept}", err=True)
        raise typer.Exit(130) from None


def split_arguments(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Things to measure, and ``key=value`` settings."""
    values = [a for a in arguments if "=" in a and not Path(a).exists() and "://" not in a]
    return [a for a in arguments if a not in values], values


def _suite(
    options: BenchOptions, source: Path | None, overrides: list[str], wants_suite: bool
) -> None:
    screen = Screen(Console(stderr=True))
    request = SuiteRequest(
        draft=source,
        url=options.base_url,
        suite=options.suite if wants_suite else "quick",
        tasks=options.tasks,
        data=options.data,
        out=options.out,
        page=options.page,
        target=options.target,
        model=options.model,
        long=options.long,
        plan=options.plan,
    )
    with resumable(options.out):
        results = bench_suite(request, overrides, screen)
    if results is None:
        return
    if options.as_json:
        typer.echo(as_json(results))
    else:
        show_suite(results, wide_console())
    if options.out is not None:
        screen.stage("figures", str(options.out))


def wide_console() -> Console:
    """A terminal as it is; a file or pipe wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def show_suite(results: SuiteResults, console: Console) -> None:
    """Tables and every notice."""
    title = f"{results.suite}: {results.name}"
    console.print(table(title, *card_rows(results)))
    console.print(table("in detail", *detail_rows(results)))
    for name, why in results.missing.items():
        console.print(Text(f"not run: {name}: {why}"))
    notes = [
        f"{a.title}, T = {a.temperature:g}: {text}" for a in results.arms for text in a.notices
    ]
    for text in [*results.notices, *notes]:
        console.print(Text(f"note: {text}"))


def table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(title=Text(title), title_justify="left")
    for place, name in enumerate(header):
        made.add_column(Text(name), justify="left" if place == 0 else "right")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _refuse(options: BenchOptions, names: list[str], belongs_to: str) -> None:
    for name in names:
        default: object = () if name == "tasks" else False if name in {"long", "as_json"} else None
        assert name in {f.name for f in fields(options)}
        if getattr(options, name) != default:
            _refuse_option(name, belongs_to)


def _refuse_option(name: str, belongs_to: str) -> NoReturn:
    option = {"as_json": "--json", "tasks": "--task"}.get(name, f"--{name.replace('_', '-')}")
    raise ConfigError(
        expected=f"{option} with {belongs_to}",
        found=f"{option} alone",
        where=f"dspark bench {option}",
        fix=f"Leave {option} out, or add {belongs_to}.",
    )
