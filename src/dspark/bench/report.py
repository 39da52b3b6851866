"""One HTML page that tells a run: what was gained, on what, how it was learned, from what it came.

The page is one file without scripts, fonts, images or outside links, so it can be mailed, archived
and opened in ten years; a content policy in its head forbids the browser to load or run anything.
Everything on it comes from JSON (``dspark.bench.results``), and everything textual is escaped by
the template: prompts and answers are other people's text and may hold markup.

It is written to be honest before it is written to please. Prompts the draft was trained for and
general prompts stand side by side at the same size; a speedup below one is called slower; where two
files disagree the page says so at the top instead of choosing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from dspark.artifacts import atomic_write
from dspark.bench import plots
from dspark.bench.curves import Training
from dspark.bench.results import (
    Bench,
    BenchArm,
    Lineage,
    Sample,
    Schema,
    Summary,
    SummaryResult,
    read_results,
)
from dspark.bench.svg import Plot
from dspark.errors import ArtifactError, MissingArtifactError
from dspark.page import TOKEN_KINDS, page_environment

REPORT_NAME = "report.html"
_GROUPS = (("workload", "Workload prompts"), ("general", "General prompts"))
_KINDS = {**TOKEN_KINDS, "prompt": "prompt"}


def render_report(
    summary: Summary, bench: Bench, training: Training | None, lineage: Lineage | None
) -> str:
    """The page as a string. ``training`` or ``lineage`` may be absent; the page says so.

    Raises:
        ArtifactError: the files describe drafts of different block sizes.
        MissingDependencyError: matplotlib is not installed.
    """
    _same_block_size(summary, bench, training)
    last = training.evals[-1] if training and training.evals else None
    real = _pooled_slots(bench)
    slots = [(t, real[t], plots.slot_estimate(t, last)) for t in sorted(real)]
    context: dict[str, Any] = {
        "summary": summary,
        "bench": bench,
        "training": training,
        "last": last,
        "lineage": lineage.artifacts if lineage else (),
        "notices": find_contradictions(summary, bench, lineage),
        "cards": _cards(summary),
        "block_size": bench.block_size,
        "kinds": _KINDS,
        "samples": _samples(bench),
        "stages": _stages(summary),
        "loss_plots": plots.loss_plots(training) if training else [],
        "acceptance_plots": plots.acceptance_plots(training.evals) if training else [],
        "gradient_plots": plots.gradient_plots(training) if training else [],
        "slot_plots": plots.slot_plots(real, last),
        "prompt_plots": plots.prompt_plots(bench),
        "slots": slots,
        "apart": largest_gap(slots),
    }
    return _environment().get_template("report.html.j2").render(context)


def largest_gap(
    slots: Sequence[tuple[float, Sequence[float], Sequence[float] | None]],
) -> tuple[float, float, int] | None:
    """Where training's estimate and real decoding are furthest apart: by how much, at which
    temperature, in which slot (from 1). None without an estimate."""
    gaps = [
        (abs(one - other), temperature, slot)
        for temperature, real, estimate in slots
        for slot, (one, other) in enumerate(zip(real, estimate or (), strict=False), start=1)
    ]
    return max(gaps, default=None)


def write_report(run_dir: Path) -> Path:
    """Read the JSON of a run folder, write ``report.html`` in it and return its path.

    ``summary.json`` and ``bench/bench.json`` must exist, ``draft/training.json`` and
    ``lineage.json`` may; all may also lie directly in ``run_dir``.

    Raises:
        ArtifactError: a file is missing, damaged or of another shape.
        MissingDependencyError: matplotlib is not installed.
        StorageError: the page cannot be written.
    """
    page = render_report(
        _needed(run_dir, "summary.json", Summary),
        _needed(run_dir, "bench/bench.json", Bench),
        _found(run_dir, "draft/training.json", Training),
        _found(run_dir, "lineage.json", Lineage),
    )
    path = run_dir / REPORT_NAME
    atomic_write(path, page)
    return path


def find_contradictions(summary: Summary, bench: Bench, lineage: Lineage | None) -> list[str]:
    """Sentences about numbers that disagree or that a reader must know before the headline."""
    notices = []
    for row in summary.results:
        name = f"{row.prompts} prompts at T = {row.temperature:g}"
        ratio = row.tokens_per_second.draft / row.tokens_per_second.plain
        if abs(row.speedup / ratio - 1) > 0.02:
            notices.append(
                f"The speedup on {name} is given as {row.speedup:.2f}, but its tokens per second "
                f"imply {ratio:.2f}."
            )
        if row.identical_to_plain and row.identical_to_plain[0] < row.identical_to_plain[1]:
            same, total = row.identical_to_plain
            notices.append(
                f"{total - same} of {total} greedy answers to {name} differ from plain decoding."
            )
        arms = [
            a for a in bench.arms if a.group == row.prompts and a.temperature == row.temperature
        ]
        if row.acceptance_length is None:
            notices.append(
                f"No verify step was taken on {name}: every answer ended with its first token."
            )
        steps = sum(a.steps for a in arms)
        if steps and row.acceptance_length is not None:
            pooled = 1 + sum(a.accepted for a in arms) / steps
            if abs(pooled - row.acceptance_length) > 0.02:
                notices.append(
                    f"The acceptance length on {name} is given as {row.acceptance_length:.2f}, but "
                    f"the counters in bench.json pool to {pooled:.2f}."
                )
    return notices + _stale_parents(lineage)


def _stale_parents(lineage: Lineage | None) -> list[str]:
    if lineage is None:
        return []
    now = {entry.artifact: entry.fingerprint for entry in lineage.artifacts}
    return [
        f"{entry.artifact} was made from another version of {parent} than the one listed."
        for entry in lineage.artifacts
        for parent, fingerprint in entry.parents.items()
        if now.get(parent, fingerprint) != fingerprint
    ]


def _same_block_size(summary: Summary, bench: Bench, training: Training | None) -> None:
    sizes = {"bench.json": bench.block_size}
    if summary.block_size is not None:
        sizes["summary.json"] = summary.block_size
    if training and training.evals:
        sizes["training.json"] = len(training.evals[-1].accept_rate)
    if len(set(sizes.values())) > 1:
        raise ArtifactError(
            expected="results of one draft, with one block size",
            found=", ".join(f"{name}: {size}" for name, size in sizes.items()),
            where="report",
            fix="Run the stages again so that all files come from the same draft.",
        )


@dataclass(frozen=True)
class Card:
    """One of the two headline cards; ``rows`` is empty where the group was not measured."""

    group: str
    title: str
    rows: tuple[SummaryResult, ...]


def _cards(summary: Summary) -> list[Card]:
    rows = sorted(summary.results, key=lambda r: r.temperature)
    return [Card(g, title, tuple(r for r in rows if r.prompts == g)) for g, title in _GROUPS]


def _pooled_slots(bench: Bench) -> dict[float, list[float]]:
    """Unconditional acceptance by temperature, pooled by steps over the workload's arms.

    Where no arm says which group it belongs to, over all of them.
    """
    chosen = [a for a in bench.arms if a.group == "workload"] or list(bench.arms)
    pooled = {}
    for temperature in {a.temperature for a in chosen}:
        arms = [a for a in chosen if a.temperature == temperature]
        total = max(sum(a.steps for a in arms), 1)
        columns = zip(*(a.per_slot_acceptance for a in arms), strict=True)
        pooled[float(temperature)] = [
            sum(v * a.steps for v, a in zip(column, arms, strict=True)) / total
            for column in columns
        ]
    return pooled


def _samples(bench: Bench) -> list[tuple[BenchArm, Sample, dict[str, int]]]:
    """Arms with a sample, the workload's first, with the number of pieces of each kind."""
    arms = sorted(bench.arms, key=lambda a: (a.group != "workload", a.temperature))
    return [(arm, arm.sample, _counts(arm.sample)) for arm in arms if arm.sample]


def _counts(sample: Sample) -> dict[str, int]:
    """Tokens of each kind, in all, and forwards of the target: one for each of its own tokens, and
    one more for an answer that ended inside an accepted block."""
    kinds: list[str] = [piece.kind for piece in sample.pieces if piece.kind != "prompt"]
    own = sum(kind != "accepted" for kind in kinds)
    forwards = own + (kinds[-1:] == ["accepted"])
    return {**{k: kinds.count(k) for k in TOKEN_KINDS}, "tokens": len(kinds), "forwards": forwards}


def _stages(summary: Summary) -> list[tuple[str, float, float]]:
    """(name, seconds, share of the longest), with what no stage accounts for as the last row."""
    rows = dict(summary.stage_seconds)
    rest = summary.seconds_total - sum(rows.values())
    if rows and rest >= 1:
        rows["between stages"] = rest
    longest = max(rows.values(), default=0.0) or 1.0
    return [(name, seconds, seconds / longest) for name, seconds in rows.items()]


def _found(run_dir: Path, place: str, schema: type[Schema]) -> Schema | None:
    """Results at ``place`` inside the run folder, or directly in it; None when in neither."""
    for path in (run_dir / place, run_dir / Path(place).name):
        if path.is_file():
            return read_results(path, schema)
    return None


def _needed(run_dir: Path, place: str, schema: type[Schema]) -> Schema:
    found = _found(run_dir, place, schema)
    if found is None:
        raise MissingArtifactError(
            expected=f"{place} in the run folder",
            found="no such file",
            where=str(run_dir),
            fix="Run the bench stage first: dspark bench RECIPE.yaml",
        )
    return found


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``8.4 s``, ``3 min 12 s``, ``1 h 04 min``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _inline_svg(plot: Plot) -> Markup:
    return Markup(plot.svg)


def _listed(values: Sequence[float], digits: int = 1) -> str:
    return ", ".join(f"{v:.{digits}f}" for v in values)


@cache
def _environment() -> Environment:
    environment = page_environment("dspark.bench")
    environment.filters |= {
        "duration": duration,
        "listed": _listed,
        "svg": _inline_svg,
    }
    return environment
