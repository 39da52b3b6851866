"""``dspark prompts``: with a run's recipe, with a recipe of prompts alone, or with files by name.

A run's recipe goes through the pipeline like every stage. The other two make a prompts folder of
their own: there is no target, only a tokenizer where one is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dspark.artifacts import (
    Manifest,
    Origin,
    Stopwatch,
    artifact_lock,
    attempt,
    begin,
    complete,
    completed,
    finish,
    is_current,
    new_manifest,
    run_lock,
)
from dspark.artifacts.machine import cpu_name
from dspark.artifacts.progress import OnDone, untold
from dspark.cli.console import Screen
from dspark.cli.figures import figures_table, shown_bytes, shown_time
from dspark.cli.loose_prompts import NAMES, Loose, loose_recipe, refuse
from dspark.cli.naming import options_named
from dspark.cli.origin import command_line, marked_commit, versions
from dspark.cli.task_items import task_items
from dspark.config.load import load_prompts_recipe
from dspark.config.prompts import FILL_IN, FileSource, HubSource, TrafficSource
from dspark.config.recipe import DataRecipe, Recipe
from dspark.data.filters.evaluation import TaskItems
from dspark.data.identity import section_identity
from dspark.data.prompt_page import PAGE
from dspark.data.prompt_report import PromptReport, source_name
from dspark.data.prompts import REPORT, build_prompts
from dspark.data.records import record_files
from dspark.data.self_instruct import working_files, write_all_turns
from dspark.data.tokens import TokenizerTokens
from dspark.errors import ConfigError

BYTES_PER_ROW = 600  # of published conversation sets, for the plan
ROWS_PER_SECOND = 7000  # all filters, one core of a server; benchmarks/results/prompt_filters.json
MEMORY_PER_ROW = 350  # two thirds of it signatures, which are a memory map
MEMORY = 250e6


def run_prompts_verb(
    path: Path | None,
    overrides: Sequence[str],
    loose: Loose,
    *,
    plan: bool,
    as_json: bool,
    run: Callable[[Path, list[str]], None],
) -> None:
    """Decide which of the three it is. ``run`` runs the stage of a run's recipe.

    Raises:
        ConfigError: a recipe and loose options together, neither, or half of the options.
        DataError and others: see :func:`dspark.data.prompts.build_prompts`.
    """
    if path is not None:
        if loose.given():
            refuse(
                "a recipe, or files by name, but not both",
                f"the recipe {path} and {', '.join(loose.given())}",
                "Leave the recipe out, or write sources and filters into it.",
            )
        recipe = load_prompts_recipe(path, overrides)
        if isinstance(recipe, Recipe):
            if as_json:
                refuse("--json without a run's recipe", str(path), "Read its report.json instead.")
            run(path, list(overrides))
            return
        folder = Path(recipe.output) / "prompts"
    else:
        recipe, folder = loose_recipe(loose)
    _refuse_blanks(recipe)
    screen = Screen()
    if plan:
        screen.console.print(_plan(recipe, folder))
        return
    with (
        options_named({} if path is not None else NAMES),
        artifact_lock(folder) if path is None else run_lock(recipe.output),
    ):
        report = make_data(recipe, folder, screen, quiet=as_json)
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        screen.console.print(_table(report))
        screen.path("report", folder / PAGE)


def make_data(
    recipe: DataRecipe, folder: Path, screen: Screen, *, quiet: bool = False
) -> PromptReport:
    """Make (or find finished) the prompts of a recipe without a target; returns their report."""
    tasks = task_items(recipe.prompts)
    tokenizer, manifest = prompts_manifest(recipe, tasks)
    tokens = None if tokenizer is None else TokenizerTokens(tokenizer)
    if is_current(folder, manifest.fingerprint):
        if not quiet:
            screen.stage("prompts", escape(f"finished before: {folder}"))
        return _finished(folder)
    watch = Stopwatch(data_origin(), lambda: 0.0)

    def tell(aside: Path, why: str) -> None:
        if not quiet:
            screen.stage("prompts", escape(f"old work moved to {aside} ({why})"))

    begin(folder, manifest, tell)
    with attempt(folder, watch):
        done = completed(folder)
        if done is None:
            _write_user_turns(recipe, folder, tokenizer)
            report = _build(recipe, folder, tokens, tasks, None if quiet else screen)
            done = complete(
                folder,
                counts=report.counts(),
                notes={"name": recipe.name},
                working=working_files(recipe.prompts.sources),
            )
        update = {"counts": done.counts, "notes": done.notes}
        finish(folder, manifest.model_copy(update=update), watch)
    return _finished(folder)


def _write_user_turns(recipe: DataRecipe, folder: Path, tokenizer: Any) -> None:
    """What the target behind the recipe's servers asks, for sources of kind self_instruct."""
    if not working_files(recipe.prompts.sources):
        return
    section = recipe.regenerate
    if section is None:
        refuse(
            "regenerate.endpoints, whose target writes the prompts of kind self_instruct",
            "no section regenerate",
            "Add regenerate: {endpoints: [{url: http://HOST:8000/v1}]}.",
        )
    from dspark.data.served import endpoints_of, write_served

    endpoints = endpoints_of(section)
    write_all_turns(
        recipe.prompts.sources,
        folder,
        tokenizer,
        (),
        lambda requests, stop_ids, keep: write_served(endpoints, section, requests, stop_ids, keep),
    )


def prompts_manifest(recipe: DataRecipe, tasks: TaskItems | None) -> tuple[Any, Manifest]:
    """The recipe's tokenizer (None without one), and the manifest that its prompts will have."""
    tokenizer, identity = None, None
    if recipe.tokenizer is not None:
        from dspark.checkpoint.tokenizer import load_tokenizer, tokenizer_hash

        tokenizer = load_tokenizer(recipe.tokenizer.source, recipe.tokenizer.revision)
        identity = tokenizer_hash(tokenizer)
    config = {"prompts": section_identity(recipe.prompts, tasks), "tokenizer": identity}
    return tokenizer, new_manifest("prompts", config)


def _build(
    recipe: DataRecipe,
    folder: Path,
    tokens: TokenizerTokens | None,
    tasks: TaskItems | None,
    screen: Screen | None,
) -> PromptReport:
    def build(on_rows: OnDone) -> PromptReport:
        section = recipe.prompts
        return build_prompts(section, folder, tokens, keep_ids=True, tasks=tasks, on_rows=on_rows)

    if screen is None:
        return build(untold)
    with screen.bar("rows", None) as bar:
        return build(bar.advance)


def _finished(folder: Path) -> PromptReport:
    return PromptReport.model_validate_json((folder / REPORT).read_bytes())


def data_origin() -> Origin:
    """As of every stage, but torch, which is not used here, is not loaded to ask its version."""
    return Origin(
        command=command_line(),
        commit=marked_commit(),
        versions=versions(("numpy",)),
        machine={"device": cpu_name(), "cores": os.cpu_count() or 1},
    )


def _refuse_blanks(recipe: DataRecipe) -> None:
    blank = [
        f"prompts.sources.{number}.{key}"
        for number, source in enumerate(recipe.prompts.sources)
        if isinstance(source, HubSource)
        for key in ("dataset", "revision")
        if source.model_dump()[key] == FILL_IN
    ]
    if blank:
        raise ConfigError(
            expected="every field that is marked FILL-IN to be filled in",
            found=", ".join(blank),
            where=f"recipe {recipe.name}",
            fix="Copy names and full commits from the data sets' pages, or remove those sources.",
        )


def _plan(recipe: DataRecipe, folder: Path) -> Table:
    """Rough rows, bytes, memory and time, from the sizes of files and counts in the recipe."""
    left = ("source", "category")
    title = f"plan of {recipe.name}: nothing was run"
    table = figures_table(title, (*left, "rows, about", "to read"), left)
    total = 0.0
    for source in recipe.prompts.sources:
        rows, size = _estimate(source)
        total += rows or 0
        told = "not known" if rows is None else f"{rows:,.0f}"
        table.add_row(source_name(source), source.category, told, size)
    table.caption = (
        f"About {shown_bytes(total * BYTES_PER_ROW * 2)} on disk while it runs, "
        f"{shown_bytes(MEMORY + total * MEMORY_PER_ROW)} of memory, "
        f"{shown_time(total / ROWS_PER_SECOND)} without a tokenizer. Writes {folder}."
    )
    return table


def _estimate(source: Any) -> tuple[float | None, str]:
    if isinstance(source, (FileSource, TrafficSource)):
        size = sum(file.stat().st_size for file in record_files(Path(source.path)))
        return size / BYTES_PER_ROW, shown_bytes(size)
    train = getattr(source, "train", 0)
    return (None if train == "all" else float(train + source.held_out)), "-"


def _table(report: PromptReport) -> Table:
    table = Table(title=f"{report.rows_in:,} rows in", title_justify="left")
    for name in ("step", "dropped", "left"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in report.funnel:
        if step.dropped:
            table.add_row(step.step, f"{step.dropped:,}", f"{step.rows_out:,}")
    table.add_row("kept", "", f"{report.rows_out:,}")
    if report.notes:
        table.caption = " ".join(report.notes)
    return table
