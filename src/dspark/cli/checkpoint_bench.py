"""``dspark bench DRAFT_FOLDER``: measure a checkpoint; its provenance names the target."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from dspark.artifacts import atomic_json
from dspark.bench.journal import UNFINISHED, Journal
from dspark.bench.play.settings import SuiteSettings
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import machine
from dspark.cli.plan import print_draft_plan
from dspark.cli.stages import bench_draft, length_text, taken_up
from dspark.cli.suite_stack import draft_identity
from dspark.config.architecture import Frozen
from dspark.config.faults import refuse
from dspark.config.load import apply_override
from dspark.config.prompts import OrderTicketSource
from dspark.config.recipe import BenchSection
from dspark.data.prompt import Prompt
from dspark.data.sources import file_prompts, prompts_of
from dspark.errors import ConfigError
from dspark.pairing import target_section


class BenchOnly(Frozen):
    """What may be set where there is no recipe."""

    bench: BenchSection = BenchSection()


def bench_checkpoint(
    folder: Path,
    prompts: Path | None,
    out: Path | None,
    overrides: list[str],
    other_target: str | None = None,
    *,
    plan: bool = False,
) -> None:
    """Decode ``prompts`` (or eight order tickets) with and without the draft; print a table.

    ``overrides`` are keys of the recipe's bench section: ``bench.max_new_tokens=64``. The target is
    the one the draft's provenance names, or ``other_target``. ``plan`` only prints how many
    decodings and how much memory that takes. With ``out``, decodings are kept beside it until the
    figures are there, and the same command after an interrupt takes them up.

    Raises:
        CheckpointError, TargetError: see :func:`dspark.cli.draft_target.load_target_of`.
        ConfigError: an override of anything but the bench section.
        StorageError: ``out`` cannot be written.
    """
    section = bench_section(overrides)
    chosen = held_out_prompts(prompts)
    screen = Screen()
    if plan:
        wanted = target_section(folder, other_target)
        print_draft_plan(folder, wanted, section, len(chosen), screen)
        return
    target = load_target_of(folder, other_target, screen)
    journal = None
    if out is not None:
        asked = "".join(prompt.model_dump_json() for prompt in chosen)
        head = {
            "machine": machine(),
            "draft": draft_identity(folder),
            "target": asdict(target.hashes),
            "bench": section.model_dump(mode="json"),
            "prompts": hashlib.sha256(asked.encode()).hexdigest(),
        }
        journal = Journal(unfinished(out), head)
        taken_up(journal, screen)
    workload = (chosen[0].category,)
    arms, rows = bench_draft(screen, target, folder, chosen, section, workload, journal)
    screen.console.print(_table(folder, rows))
    if out is not None:
        atomic_json(out, {"results": rows, "arms": arms})
        unfinished(out).unlink()
        screen.stage("figures", str(out))


def unfinished(out: Path) -> Path:
    """Where decodings lie until ``out`` is written."""
    return out.with_name(f".{out.name}.{UNFINISHED}")


def held_out_prompts(file: Path | None, tickets: int = 8) -> list[Prompt]:
    """All prompts of the file, or order ``tickets`` without one; how many are measured, and left
    out, is the bench section's say."""
    if file is not None:
        return file_prompts(file)
    return list(prompts_of(OrderTicketSource(kind="order_tickets", held_out=tickets, seed=1)))


def bench_section(overrides: list[str]) -> BenchSection:
    """The bench section of ``overrides`` like ``bench.max_new_tokens=64``.

    Raises:
        ConfigError: anything but keys of that section.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in SuiteSettings.model_fields and key not in BenchSection.model_fields:
            raise ConfigError(
                expected="a key of the bench section, such as bench.max_new_tokens=64",
                found=repr(key),
                where=f"override {override!r}",
                fix=f"{key} is a setting of a suite: add --suite quick, say.",
            )
    data: dict[str, Any] = {}
    touched = [apply_override(data, override, BenchOnly) for override in overrides]
    try:
        return BenchOnly.model_validate(data).bench
    except ValidationError as error:
        refuse(error, data, BenchOnly, "without a recipe", touched)


def _table(folder: Path, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=Text(str(folder)), title_justify="left")
    columns = ("T", "acceptance", "95 %", "plain tok/s", "draft tok/s", "speed-up", "identical")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        same = row["identical_to_plain"]
        table.add_row(
            str(row["temperature"]),
            length_text(row["acceptance_length"]),
            "-" if row["ci95"] is None else "{:.2f} to {:.2f}".format(*row["ci95"]),
            f"{row['tokens_per_second']['plain']:.1f}",
            f"{row['tokens_per_second']['draft']:.1f}",
            f"{row['speedup']:.2f}x",
            "-" if same is None else f"{same[0]} of {same[1]}",
        )
    return table
