"""``dspark regenerate``: the stage of a run, or answers for a recipe of prompts alone.

The latter has no target on this machine: the recipe's servers answer its prompts, and its tokenizer
checks what they say. That is how answers of a target with a trillion parameters are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from dspark.artifacts import (
    MANIFEST,
    Stopwatch,
    attempt,
    begin,
    complete,
    completed,
    finish,
    is_current,
    new_manifest,
    parent_of,
    read_manifest,
    run_lock,
)
from dspark.cli.console import Screen
from dspark.cli.figures import figures_table, shown_bytes
from dspark.cli.prompts import data_origin, prompts_manifest
from dspark.cli.task_items import task_items
from dspark.config.answers import RegenerateSection
from dspark.config.load import load_prompts_recipe
from dspark.config.recipe import DataRecipe, Recipe
from dspark.data.answer_report import PAGE, AnswerReport
from dspark.data.chat import end_of_turn_ids
from dspark.data.regenerate import UNFINISHED, regenerate
from dspark.data.renderer import Renderer
from dspark.data.served import Served, endpoints_of
from dspark.data.shards import stream_prompts
from dspark.data.witness import Witness
from dspark.errors import ConfigError, MissingArtifactError

BYTES_PER_TOKEN = 9  # an id of six digits, its comma, its mask and the mask's comma


def run_regenerate_verb(
    path: Path, overrides: Sequence[str], *, plan: bool, run: Callable[[Path, list[str]], None]
) -> None:
    """Answer the prompts of ``path``; ``run`` runs the stage of a run's recipe.

    Raises:
        ConfigError: a recipe that names nobody who answers.
        MissingArtifactError: its prompts are not made.
        EndpointError: a server that is not there or does not tell the truth.
        BusyError: another process writes into the recipe's folder.
    """
    recipe = load_prompts_recipe(path, overrides)
    if isinstance(recipe, Recipe):
        run(path, list(overrides))
        return
    if recipe.regenerate is None:
        raise ConfigError(
            expected="a section `regenerate` with endpoints, or a run's recipe with a target",
            found="neither",
            where=str(path),
            fix="Add regenerate: {endpoints: [{url: http://HOST:8000/v1}]}.",
        )
    screen = Screen()
    try:
        if plan:
            screen.console.print(_plan(recipe, recipe.regenerate))
        else:
            with run_lock(recipe.output):
                make_answers(recipe, recipe.regenerate, screen)
    except KeyboardInterrupt:
        typer.echo("\nInterrupted. Run the same command again to resume.", err=True)
        raise typer.Exit(130) from None


def make_answers(recipe: DataRecipe, section: RegenerateSection, screen: Screen) -> None:
    """Have the recipe's servers answer its prompts; finished answers are left as they are."""
    tokenizer, wanted = prompts_manifest(recipe, task_items(recipe.prompts))
    source, folder = Path(recipe.output) / "prompts", Path(recipe.output) / "answers"
    _require(source, wanted.fingerprint)
    parent = parent_of(source, "prompts", folder)
    tokenizer_config = {**_tokenizer(recipe), "hash": wanted.config["tokenizer"]}
    config = {"tokenizer": tokenizer_config, "regenerate": section.identity()}
    manifest = new_manifest("answers", config, [parent])
    if is_current(folder, manifest.fingerprint):
        screen.stage("answers", escape(f"finished before: {folder}"))
        return
    endpoints = endpoints_of(section)
    renderer = Renderer(tokenizer, _end_ids(recipe, tokenizer), section)
    answering = Served(endpoints, section, Witness(renderer, _tokenizer(recipe)["revision"]))
    watch = Stopwatch(data_origin(), lambda: 0.0)

    def tell(aside: Path, why: str) -> None:
        screen.stage("answers", escape(f"old work moved to {aside} ({why})"))

    begin(folder, manifest, tell)
    with attempt(folder, watch):
        done = completed(folder)
        if done is None:
            total = read_manifest(source, "prompts").counts["train"]
            with screen.bar("servers answer", total) as bar:
                report = regenerate(
                    lambda: stream_prompts(source, "train"), answering, section, folder, bar.advance
                )
            done = complete(
                folder,
                counts=report.counts(),
                notes=_notes(report),
                line=report.line(),
                working=(UNFINISHED,),
            )
        update = {"counts": done.counts, "notes": done.notes}
        finish(folder, manifest.model_copy(update=update), watch)
    screen.stage("answers", done.line)
    for url, why in done.notes["lost_endpoints"].items():
        screen.stage("lost", escape(f"endpoint {url}: {why}"))
    screen.path("report", folder / PAGE)


def _notes(report: AnswerReport) -> dict[str, object]:
    kept = {"finish_reasons", "dropped", "coverage", "truncated", "lost_endpoints"}
    return report.model_dump(mode="json", include=kept)


def _tokenizer(recipe: DataRecipe) -> dict[str, str | None]:
    assert recipe.tokenizer is not None  # the recipe's own rule
    return {"source": recipe.tokenizer.source, "revision": recipe.tokenizer.revision}


def _end_ids(recipe: DataRecipe, tokenizer: object) -> frozenset[int]:
    from dspark.checkpoint.tokenizer import generation_end_ids

    named = _tokenizer(recipe)
    found = generation_end_ids(str(named["source"]), named["revision"])
    return end_of_turn_ids(tokenizer, found)  # type: ignore[arg-type]


def _require(folder: Path, fingerprint: str) -> None:
    if is_current(folder, fingerprint):
        return
    there = (folder / MANIFEST).exists()
    raise MissingArtifactError(
        expected="the prompts of this recipe, finished",
        found="prompts of other settings" if there else "none",
        where=str(folder),
        fix="Run `dspark prompts` with this recipe first.",
    )


def _plan(recipe: DataRecipe, section: RegenerateSection) -> Table:
    """Upper bounds of what a regeneration writes and asks, from the finished prompts."""
    _, wanted = prompts_manifest(recipe, task_items(recipe.prompts))
    source = Path(recipe.output) / "prompts"
    _require(source, wanted.fingerprint)
    prompts = turns = 0
    for prompt in stream_prompts(source, "train"):
        prompts += 1
        turns += min(1 + len(prompt.later_turns), section.turns)
    each = recipe.prompts.max_prompt_tokens + section.most_new_tokens()
    tokens = turns * section.most_new_tokens()
    names = ("prompts", "requests", "generated tokens", "on disk", "at once")
    table = figures_table(f"plan of {recipe.name}: nothing was run", names)
    table.add_row(
        f"{prompts:,}",
        f"{turns:,}",
        f"{tokens:,}",
        shown_bytes(2 * turns * each * BYTES_PER_TOKEN),
        f"{sum(e.concurrency for e in section.endpoints)}",
    )
    table.caption = f"Upper bounds, while it runs. Writes {Path(recipe.output) / 'answers'}."
    return table
