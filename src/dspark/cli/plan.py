"""``--plan``: what a run or a bench would need, before anything runs.

The bounds are made in ``dspark.cli.bounds``; here they are gathered and printed. Only configs and
prompt sources are read: no weights, and of a hub id only its ``config.json``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dspark.artifacts import Kind
from dspark.checkpoint.pretrained import read_tokenizer
from dspark.checkpoint.published import read_config
from dspark.checkpoint.sizes import read_sizes
from dspark.checkpoint.source import find_target
from dspark.checkpoint.tokenizer import generation_end_ids
from dspark.cli.bounds import (
    RATE,
    BenchLoad,
    Bounds,
    Need,
    bench_need,
    prompt_bytes,
    target_weights,
)
from dspark.cli.console import Screen
from dspark.cli.context import LEFT_OUT, RunContext
from dspark.cli.figures import figures_table, shown_bytes, shown_time
from dspark.config.prompts import FileSource, HubSource, PromptSource, SelfInstructSource
from dspark.config.recipe import BenchSection, TargetSection
from dspark.data.chat import check_mask_token, end_of_turn_ids
from dspark.data.sources import usable_prompts
from dspark.errors import MissingDependencyError, TargetError

TOKEN_BYTES = 12  # of text as JSON holds it; a token of prose is 4


def plan_of(run: RunContext) -> dict[Kind, Need]:
    """Bounds of every stage of ``run``.

    Raises:
        ConfigError: a draft that does not fit the target, a mask token that text could hold, or a
            context beyond the target's own.
        TargetError: no such target, no network, or a config that cannot be read.
        DataError, MissingDependencyError: a prompt source that is here cannot be read.
    """
    target = read_sizes(run.recipe.target, run.target_files)
    _check_mask(run, target.shape.vocab_size)
    size, turns, sources = 0, 0, run.recipe.prompts.sources
    with run.screen.bar("reading prompt sources", len(sources)) as bar:
        for source in sources:
            found = _source_size(run, source)
            size, turns = size + found[0], turns + found[1]
            bar.advance()
    return Bounds(run.recipe, target, size, turns).needs()


def _check_mask(run: RunContext, vocabulary: int) -> None:
    """As the run checks ``draft.mask_token_id``, where the target's tokenizer is here."""
    files, why = run.target_files, "the target's files are not here yet"
    tokenizer = None
    if not files.hub and Path(files.location).is_dir():
        try:
            tokenizer = read_tokenizer(files)
        except (TargetError, MissingDependencyError) as error:
            why = error.found
    if tokenizer is None:
        run.screen.stage("assumed", f"draft.mask_token_id is a reserved id: {why}")
        return
    ends = end_of_turn_ids(tokenizer, generation_end_ids(files.source))
    check_mask_token(tokenizer, run.recipe.draft.mask_token_id, vocabulary, ends)


def _source_size(run: RunContext, source: PromptSource) -> tuple[int, int]:
    """Bytes and asked turns of a source's prompts: read, or assumed (and said) when they are not
    here yet.

    A plan downloads nothing, and is most wanted before a large file of prompts is brought.
    """
    away = isinstance(source, (HubSource, SelfInstructSource)) or (
        isinstance(source, FileSource) and not Path(source.path).exists()
    )
    kinds = (HubSource, FileSource, SelfInstructSource)
    if not (isinstance(source, kinds) and away and source.train != "all"):
        return prompt_bytes(usable_prompts(source), run.recipe.regenerate.turns)
    number = int(source.train) + source.held_out
    each = run.recipe.prompts.max_prompt_tokens * TOKEN_BYTES
    where = source.path if isinstance(source, FileSource) else source.kind
    run.screen.stage("assumed", f"{number:,} prompts of {source.category}, not here yet: {where}")
    return number * each, int(source.train)


def print_plan(run: RunContext, only: Kind | None) -> None:
    """One row a stage; ``only`` that one. Raises as :func:`plan_of`."""
    from dspark.cli.plan_state import print_standings, standings

    left_out = LEFT_OUT[run.recipe.train.mode]
    needs = {
        kind: need
        for kind, need in plan_of(run).items()
        if only == kind or (only is None and kind not in left_out)
    }
    found = {kind: stand for kind, stand in standings(run).items() if kind in needs}
    console = run.screen.console
    title = f"plan of {run.recipe.name}: nothing was run"
    console.print(plan_table(title, needs, {kind: stand.state for kind, stand in found.items()}))
    print_standings(found, console)
    console.print(Text(f"Writes {run.root}/{', '.join(needs)}."), highlight=False, soft_wrap=True)
    prompt, answer = run.recipe.prompts.max_prompt_tokens, run.recipe.regenerate.max_new_tokens
    console.print(
        f"Upper bounds: every prompt of {prompt} tokens, every answer of {answer}; working files "
        f"are gone when a stage is finished. {assumptions()}",
        highlight=False,
        soft_wrap=True,
    )


def print_draft_plan(
    folder: Path, target: TargetSection, section: BenchSection, prompts: int, screen: Screen
) -> None:
    """What measuring the draft in ``folder`` on ``prompts`` prompts takes; nothing is decoded.

    Raises:
        CheckpointError: no sound config in ``folder``.
        TargetError, MissingDependencyError: as :func:`plan_of`.
    """
    config, _ = read_config(folder)
    sizes = read_sizes(target, find_target(target.source, target.revision))
    measured = min(prompts, section.prompts_per_category)
    length = max(target.max_context - section.max_new_tokens, 1)
    load = BenchLoad(prompts=measured, categories=1, groups=1, tokens=length, fixed=0)
    weights = target_weights(sizes, target.dtype, ["float32"])
    need = bench_need(section, sizes, config, load, weights)
    names = ("prompts", "left out", "decodings, both arms", "memory", "rough time")
    table = figures_table(f"plan of a bench of {folder}: nothing was run", names)
    table.add_row(
        f"{measured:,}",
        f"{prompts - measured:,}",
        f"{need.rows:,}",
        shown_bytes(need.memory),
        shown_time(need.seconds),
    )
    screen.console.print(table)
    screen.console.print(
        f"Upper bounds: every prompt of {length} tokens, every answer of "
        f"{section.max_new_tokens}. {assumptions()}",
        highlight=False,
        soft_wrap=True,
    )


def assumptions() -> str:
    """What the rough times rest on."""
    return f"Times assume {RATE / 1e9:.0f} Gflop/s a core on {os.cpu_count()} cores."


def plan_table(title: str, needs: Mapping[Kind, Need], states: Mapping[Kind, str]) -> Table:
    """The bounds as a table; ``states`` say what of the work is there already."""
    names = ("stage", "rows", "on disk", "working files", "memory", "rough time", "now")
    table = figures_table(title, names, ("stage", "now"))
    for kind, need in needs.items():
        table.add_row(
            kind,
            f"{need.rows:,}",
            shown_bytes(need.disk),
            shown_bytes(need.working),
            shown_bytes(need.memory),
            shown_time(need.seconds),
            states.get(kind, "new"),
        )
    return table
