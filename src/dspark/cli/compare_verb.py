"""What ``dspark compare`` was asked for, and how its outcome is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from dspark.bench.figures.comparison import Comparison, Identity
from dspark.bench.figures.tables import pair_rows
from dspark.cli.bench_verb import resumable, split_arguments, table, wide_console
from dspark.cli.compare import CompareRequest, compare, compare_table, comparison_json
from dspark.cli.console import Screen
from dspark.cli.suite_bench import SuiteRequest
from dspark.errors import ConfigError


@dataclass(frozen=True)
class CompareOptions:
    """The verb's options as they were typed."""

    arguments: tuple[str, ...]
    no_draft: bool
    reference: str | None
    suite: str | None
    tasks: tuple[str, ...]
    data: Path | None
    target: str | None
    out: Path | None
    from_table: Path | None
    as_json: bool


def run_compare(options: CompareOptions) -> None:
    """Do what was asked.

    Raises:
        ConfigError: not two things, or a table and two things. Else as :func:`compare`.
    """
    sides, overrides = split_arguments(options.arguments)
    if options.from_table is not None and not sides:
        _show_table(compare_table(options.from_table), as_json=options.as_json)
        return
    if len(sides) != 2 or options.from_table is not None:
        raise ConfigError(
            expected="two things to compare, or --from-table FILE alone",
            found=" and ".join(sides) or "none",
            where="dspark compare",
            fix="For example: dspark compare DRAFT_A DRAFT_B --suite quick --no-draft",
        )
    suite = options.suite or (None if options.tasks else "quick")
    request = CompareRequest(
        a=sides[0],
        b=sides[1],
        suite=SuiteRequest(None, None, suite, options.tasks, options.data, target=options.target),
        no_draft=options.no_draft or options.reference is not None,
        reference=options.reference,
        out=options.out,
    )
    screen = Screen(Console(stderr=True))
    with resumable(options.out):
        comparison, _ = compare(request, overrides, screen)
    if options.as_json:
        typer.echo(comparison_json(comparison))
    else:
        show_comparison(comparison, wide_console())
    if options.out is not None:
        screen.stage("figures", str(options.out / "comparison.json"))


def show_comparison(comparison: Comparison, console: Console) -> None:
    """The table, both averages, identities and the verdicts."""
    console.print(table("prompt by prompt", *pair_rows(comparison)))
    for own in comparison.overall:
        console.print(
            Text(
                f"T = {own.temperature:g}: ratio of means {100 * own.ratio_of_means:.1f} %, mean "
                f"of ratios {100 * own.mean_of_ratios:.1f} % over {own.benchmarks} benchmarks"
            )
        )
    for pair in comparison.pairs:
        for identity in pair.identity:
            for line in _apart(pair.title, identity):
                console.print(Text(line))
    for text in [*comparison.stack_differences, *comparison.notices]:
        console.print(Text(f"note: {text}"))
    for own in comparison.overall:
        console.print(Text(own.verdict, style="bold"))


def _apart(title: str, identity: Identity) -> list[str]:
    told = []
    for found in identity.divergences:
        place = "somewhere (only hashes are known)"
        if found.token is not None:
            place = f"from token {found.token} on"
        elif found.character is not None:
            place = f"from character {found.character} on"
        told.append(
            f"{title}: {identity.first} and {identity.second} differ on {found.question}, turn "
            f"{found.turn + 1}, {place}"
        )
    return told


def _show_table(averages: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(averages, indent=2))
        return
    for name in ("ratio_of_means", "mean_of_ratios"):
        typer.echo(f"{name.replace('_', ' ')}: {100 * float(str(averages[name])):.1f} %")
    typer.echo(averages["note"])
