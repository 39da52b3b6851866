"""``dspark calibrate``: make a draft's confidences mean what they say, on held-out prompts.

The draft and its target answer prompts that training did not see, verifying everything, and one
temperature a slot is fitted to what was accepted (``dspark.decoding.calibration``), for every
temperature of the bench section. The result lies beside the weights, bound by hashes to both
models, as ``calibration.json`` for engines and ``calibration.html`` for people.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer
from jinja2 import Template
from rich.console import Console
from rich.table import Table

from dspark.artifacts import atomic_write
from dspark.artifacts import verify as verify_artifact
from dspark.bench.svg import INK, SERIES, Plot, panel, require_plotting
from dspark.checkpoint.calibration import (
    PAGE,
    CalibratedMode,
    Calibration,
    read_calibration,
    write_calibration,
)
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.identity import draft_hash
from dspark.checkpoint.published import read_config
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.checkpoint_bench import bench_section, held_out_prompts
from dspark.cli.console import Screen
from dspark.cli.context import RunContext
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import command_line
from dspark.config.engine import EngineOptions
from dspark.config.load import load_recipe
from dspark.config.recipe import BenchSection
from dspark.data.chat import end_ids, prompt_ids
from dspark.data.prompt import Prompt
from dspark.data.shards import read_prompts
from dspark.decoding.calibration import Fit, fit
from dspark.decoding.params import SamplingParams
from dspark.decoding.verify import check_modes
from dspark.engine.core import EngineCore
from dspark.engine.drafter import Drafter
from dspark.engine.recording import record_blocks
from dspark.model.fp8 import serving_form
from dspark.page import page_environment

BATCH = 8
# Answers at least, above temperature 0, where several to one prompt differ.
ANSWERS = 64
# Order tickets for a checkpoint that comes without prompts.
TICKETS = 64


def calibrate(
    path: Path,
    prompts: Path | None,
    other_target: str | None,
    overrides: list[str],
    *,
    as_json: bool,
) -> None:
    """Calibrate the draft of a recipe's run, or a checkpoint folder.

    Args:
        path: a recipe, whose held-out prompts are used, or the folder of a draft.
        prompts: instead: a file of prompts.
        other_target: instead of the one that the draft's provenance names.
        overrides: of the recipe, or of its bench section for a folder.

    Raises:
        DecodingError: too few blocks.
        CheckpointError, TargetError, ArtifactError: what loading may raise.
    """
    require_plotting()
    screen = Screen(Console(stderr=True))
    if path.is_dir():
        folder, section = path, bench_section(overrides)
        target = load_target_of(folder, other_target, screen)
        rows = held_out_prompts(prompts, TICKETS)
    else:
        recipe = load_recipe(path, overrides)
        run = RunContext(recipe, command_line(), screen)
        folder, section, target = run.folder("draft"), recipe.bench, run.target
        verify_artifact(folder, "draft")
        rows = (
            read_prompts(run.folder("prompts"), "held_out")
            if prompts is None
            else held_out_prompts(prompts, TICKETS)
        )
    made = calibration_of(screen, folder, target, rows, section)
    where = write_calibration(folder, made)
    # What was written is what an engine will read.
    read_calibration(folder, draft=made.draft, target=made.target, block_size=made.block_size)
    atomic_write(folder / PAGE, _page(made))
    if as_json:
        typer.echo(json.dumps(made.model_dump(mode="json"), indent=2))
        return
    console = Console()
    for mode in made.modes:
        console.print(_table(mode))
    screen.stage("calibration", f"{where} and {PAGE}")


def calibration_of(
    screen: Screen,
    folder: Path,
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    section: BenchSection,
) -> Calibration:
    """Fit every temperature of ``section`` on answers to ``prompts``."""
    config, _ = read_config(folder)
    model = target.build(config.target_layer_ids)
    head = model.head_weight()
    draft, _ = load_draft(
        folder,
        dtype=target.dtype,
        device=target.device,
        head=head,
        embedding=model.embedding_weight(),
        fp8=serving_form(target.device),
    )
    core = EngineCore(
        model,
        Drafter(draft, head),
        end_ids(target),
        options=EngineOptions(
            max_requests=BATCH,
            verification=section.verification,
            draft_sample_method=section.draft_sample_method,
        ),
    )
    ids = [prompt_ids(target.tokenizer, q.messages, q.tools) for q in prompts]
    several = -(-ANSWERS // max(len(ids), 1))
    each = {t: 1 if t == 0 else several for t in section.temperatures}
    modes = []
    with screen.bar("recorded answers", len(ids) * sum(each.values())) as bar:
        for temperature, answers in each.items():
            asked = [prompt for prompt in ids for _ in range(answers)]
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=section.seed + number,
                    max_new_tokens=section.max_new_tokens,
                )
                for number in range(len(asked))
            ]
            found = record_blocks(core, asked, params, bar.advance).arrays()
            modes.append(_mode(section, temperature, fit(*found)))
    return Calibration(
        draft=draft_hash(folder),
        target=target.hashes.weights,
        block_size=config.block_size,
        prompts=len(prompts),
        modes=tuple(modes),
    )


def _mode(section: BenchSection, temperature: float, fitted: Fit) -> CalibratedMode:
    method = section.draft_sample_method
    rule = check_modes(section.verification, method, temperature)
    return CalibratedMode.model_validate(
        {
            "rule": rule,
            "one_hot": rule == "greedy" or method == "greedy",
            "temperature": temperature,
            **dataclasses.asdict(fitted),
        }
    )


def _table(mode: CalibratedMode) -> Table:
    title = f"{mode.rule}, T = {mode.temperature:g}, {mode.blocks:,} blocks"
    table = Table(title=title, title_justify="left")
    for name in ("slot", "T_k", "ECE", "after", "AUC", "after", "Brier", "after"):
        table.add_column(name, justify="right")
    for slot, (t, a, b) in enumerate(
        zip(mode.temperatures, mode.before, mode.after, strict=True), 1
    ):
        areas = ["-" if x is None else f"{x:.3f}" for x in (a.auc, b.auc)]
        ece = (f"{100 * a.ece:.1f} %", f"{100 * b.ece:.1f} %")
        table.add_row(str(slot), f"{t:.2f}", *ece, *areas, f"{a.brier:.3f}", f"{b.brier:.3f}")
    return table


def reliability_plot(mode: CalibratedMode) -> Plot:
    """Observed against predicted survival, before and after; the diagonal is perfect."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=INK, lw=0.8, ls=(0, (4, 3)), label="perfect")
        for bins, colour, marker, name in (
            (mode.reliability_before, SERIES[1], "s", "before"),
            (mode.reliability_after, SERIES[0], "o", "after"),
        ):
            x, y = [b.predicted for b in bins], [b.observed for b in bins]
            axes.plot(x, y, marker=marker, color=colour, label=name)
        axes.set(xlabel="predicted survival", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left")

    before, after = (sum(s.ece for s in side) / len(side) for side in (mode.before, mode.after))
    text = (
        f"Calibration error, mean over slots: {100 * before:.1f} % before, "
        f"{100 * after:.1f} % after, on {mode.blocks} blocks."
    )
    title = f"Survival, {mode.rule} at T = {mode.temperature:g}"
    return panel(f"reliability-{mode.rule}-{mode.temperature:g}", title, text, draw)


def _page(made: Calibration) -> str:
    return _template().render(
        calibration=made, panels=[(mode, reliability_plot(mode)) for mode in made.modes]
    )


@cache
def _template() -> Template:
    return page_environment("dspark.page").get_template("calibration.html.j2")
