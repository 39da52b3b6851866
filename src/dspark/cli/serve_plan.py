"""``dspark serve DRAFT --plan``: memory and cache capacity, from configs alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
import typer
from rich.console import Console
from rich.table import Table

from dspark.checkpoint.published import read_config
from dspark.checkpoint.sizes import WIDTH, TargetSizes, read_sizes
from dspark.checkpoint.source import find_target
from dspark.cli.bounds import PROCESS, target_weights
from dspark.cli.naming import options_named
from dspark.cli.serve import served_draft
from dspark.cli.serve_options import NAMES, ServeOptions
from dspark.cli.speculation import engine_options, read_speculation
from dspark.config.architecture import DraftConfig
from dspark.config.engine import EngineOptions
from dspark.model.draft import DSparkDraft
from dspark.pairing import target_section


@dataclass(frozen=True)
class Capacity:
    """What a server would take and hold; bytes and tokens.

    ``memory`` is all of it at its peak (weights as they are read included), ``cache`` what cached
    rows may grow to, ``states`` the recurrent states of a hybrid target, ``whole`` how many answers
    of the longest context fit at once.
    """

    context: int
    target: int
    draft: int
    per_token: int
    pages: int
    page_size: int
    cache: int
    tokens: int
    whole: int
    answers: int
    memory: int
    states: int = 0


def capacity(
    config: DraftConfig, target: TargetSizes, dtype: str, options: EngineOptions
) -> Capacity:
    """Figures for a draft on a target in ``dtype`` under ``options``."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DSparkDraft(config).parameters())
    width = WIDTH[dtype]
    context = target.shape.max_position_embeddings
    row = target.row_bytes + config.num_hidden_layers * config.row_width * width
    states = target.state_bytes * (options.max_requests + options.state_snapshots)
    fits = (int(options.cache_gib * 2**30) - states) // (row * options.page_size)
    needed = math.ceil(context / options.page_size) * options.max_requests
    pages = max(1, min(fits, needed))
    tokens = pages * options.page_size
    # Weights, and packed once more on a CPU.
    draft = 2 * parameters * width
    weights = target_weights(target, dtype, [dtype]) - PROCESS
    cache = pages * options.page_size * row
    return Capacity(
        context, weights, draft, row, pages, options.page_size, cache, tokens, tokens // context,
        options.max_requests, PROCESS + weights + draft + cache + states, states,
    )  # fmt: skip


def plan_embedded(options: ServeOptions) -> Capacity:
    """The capacity of a server with ``options``; nothing is loaded.

    Raises:
        DSparkError: what serving would refuse of the options, the draft or the target.
    """
    found = read_speculation(served_draft(options.draft), options.speculative_config)
    config, _ = read_config(options.draft)
    section = target_section(options.draft, options.target)
    if options.max_model_len is not None:
        section = section.model_copy(update={"max_context": options.max_model_len})
    with options_named(NAMES):
        sizes = read_sizes(section, find_target(section.source, section.revision))
    engine = engine_options(options, config.block_size, found)
    return capacity(config, sizes, section.dtype, engine)


def show_plan(plan: Capacity, *, as_json: bool) -> None:
    """The figures on stdout."""
    if as_json:
        typer.echo(json.dumps(asdict(plan), indent=2))
        return
    table = Table(title="dspark serve: memory and capacity", box=None, show_header=False)
    for name, text in rows(plan):
        table.add_row(name, text)
    console = Console()
    console.print(table)
    console.print("nothing was run")


def rows(plan: Capacity) -> list[tuple[str, str]]:
    """The figures as a person reads them."""
    cut = "" if plan.whole >= plan.answers else ": others wait or are computed again"
    return [
        ("memory at most", _size(plan.memory)),
        ("  target", f"{_size(plan.target)}, while its files are read"),
        ("  draft", _size(plan.draft)),
        ("  cached rows", f"{_size(plan.cache)}, taken as they are written"),
        *([("  states", f"{_size(plan.states)}, of recurrent layers")] if plan.states else []),
        ("context", f"{plan.context:,} tokens"),
        ("cache", f"{plan.tokens:,} tokens in {plan.pages:,} pages of {plan.page_size}"),
        ("per token", f"{plan.per_token:,} bytes in all layers of target and draft"),
        ("answers at once", f"{plan.answers}; {plan.whole} of the longest context fit{cut}"),
    ]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
