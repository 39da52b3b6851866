"""``dspark compare A B``: two drafts on one stack, or two results, or a published table.

A and B are two draft folders (both beside the same target, loaded once), two servers' urls, or two
results of ``dspark bench --out``. Only the first two are measured here, interleaved; results that
were measured apart are compared as far as that goes, and what differs besides the draft is listed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_json, atomic_write
from dspark.bench.figures.comparison import Comparison, Identity
from dspark.bench.figures.identity import identity_of
from dspark.bench.figures.page import render_comparison
from dspark.bench.figures.pairs import compare_results, table_averages
from dspark.bench.figures.schema import ArmFigures, SuiteResults
from dspark.bench.play.interleaved import play_interleaved
from dspark.bench.play.log import AnswerLog, read_answers
from dspark.bench.play.play import warm_up
from dspark.bench.play.settings import SuiteSettings, settings_from
from dspark.bench.play.turn import Turn
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.suite_bench import (
    ANSWERS,
    SuiteRequest,
    finished_arm,
    head_of,
    plan_tasks,
    read_suite,
    results_of,
    with_suite,
)
from dspark.cli.suite_stack import Stack, engine_stack, server_stack
from dspark.config.load import read_json_object
from dspark.errors import ArtifactError, ConfigError, DataError
from dspark.pairing import check_pair

PLAIN = "no draft"
Identities = dict[tuple[str, float], list[Identity]]


@dataclass(frozen=True)
class CompareRequest:
    """``out`` is a folder: results of every arm, and comparison.json."""

    a: str
    b: str
    suite: SuiteRequest
    no_draft: bool = False
    reference: str | None = None
    out: Path | None = None


def compare(
    request: CompareRequest, overrides: list[str], screen: Screen
) -> tuple[Comparison, list[SuiteResults]]:
    """Measure or read both, and compare.

    Raises:
        ConfigError: two things of different kinds.
        DataError: nothing in common.
        EndpointError: a server is gone.
    """
    if request.a.endswith(".json") and request.b.endswith(".json"):
        return _compare_files(Path(request.a), Path(request.b))
    settings = settings_from(overrides).model_copy(update={"concurrency": 1})
    settings = with_suite(settings, request.suite.suite)
    return asyncio.run(_live(request, settings, screen))


def compare_table(path: Path) -> dict[str, Any]:
    """Both averages of a published table: ``{"rows": [{"benchmark": b, "a": x, "b": y}]}``.

    Raises:
        ConfigError: no JSON object.
        DataError: rows that are not of that shape.
    """
    raw = read_json_object(path, "a comparison table")
    rows = raw.get("rows")
    try:
        if not isinstance(rows, list):
            raise TypeError(f"rows: {rows!r:.60}")
        table = [(str(row["benchmark"]), float(row["a"]), float(row["b"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            expected='{"rows": [{"benchmark": NAME, "a": LENGTH, "b": LENGTH}]}',
            found=f"{type(error).__name__}: {error}",
            where=str(path),
            fix="Correct the table.",
        ) from error
    ratio, mean = table_averages(table)
    return {
        "benchmarks": len(table),
        "ratio_of_means": ratio,
        "mean_of_ratios": mean,
        "ratios": {name: a / b for name, a, b in table},
        "note": "A published table has no prompts: no interval and no verdict follow from it.",
    }


async def _live(
    request: CompareRequest, settings: SuiteSettings, screen: Screen
) -> tuple[Comparison, list[SuiteResults]]:
    planned, missing = plan_tasks(request.suite, settings, screen)
    async with AsyncExitStack() as opened:
        stacks = await _stacks(request, settings, screen, opened)
        logs = {
            s.name: AnswerLog(_place(request, s), head_of(s, settings, planned)) for s in stacks
        }
        for stack in stacks:
            await warm_up(stack.player, planned[0].task, planned[0].questions, settings)
        players = {s.name: s.player for s in stacks}
        done: dict[str, list[ArmFigures]] = {s.name: [] for s in stacks}
        identities: Identities = {}
        answers = len(settings.temperatures) * sum(len(p.questions) for p in planned)
        with screen.bar("prompts, interleaved", answers * len(stacks)) as bar:
            for plan in planned:
                for temperature in settings.temperatures:
                    arms = await play_interleaved(
                        players, logs, plan.task, plan.questions, temperature, settings,
                        bar.advance,
                    )  # fmt: skip
                    for name, arm in arms.items():
                        done[name].append(finished_arm(arm, plan, settings))
                    turns = {name: arm.turns for name, arm in arms.items()}
                    identities[plan.task.name, temperature] = _identities(turns, temperature)
        results = [
            _results(request, settings, stack, done[stack.name], missing, logs[stack.name])
            for stack in stacks
        ]
    names = (stacks[0].name, stacks[1].name)
    comparison = compare_results(results[0], results[1], names, identities)
    if request.out is not None:
        write_comparison(request.out, comparison, results)
    return comparison, results


async def _stacks(
    request: CompareRequest, settings: SuiteSettings, screen: Screen, opened: AsyncExitStack
) -> list[Stack]:
    """A, B and, where asked for, plain decoding."""
    urls = [name for name in (request.a, request.b) if name.startswith(("http://", "https://"))]
    if len(urls) == 2:
        if request.no_draft and request.reference is None:
            raise ConfigError(
                expected="the url of a server without a draft, for --no-draft between servers",
                found="none",
                where="dspark compare --no-draft",
                fix="Add --reference URL.",
            )
        wanted = [("A", request.a), ("B", request.b)]
        wanted += [(PLAIN, request.reference)] if request.reference is not None else []
        return [
            await opened.enter_async_context(
                server_stack(url, request.suite.model, settings, f"{name} {url}")
            )
            for name, url in wanted
        ]
    folders = [Path(request.a), Path(request.b)]
    if urls or not all(folder.is_dir() for folder in folders):
        raise ConfigError(
            expected="two draft folders, two urls, or two results (.json)",
            found=f"{request.a} and {request.b}",
            where="dspark compare",
            fix="Name two of one kind.",
        )
    target = load_target_of(folders[0], request.suite.target, screen)
    check_pair(
        folders[1],
        target,
        lambda text: screen.stage("warning", text),
        named=request.suite.target is not None,
    )
    names = _names(folders)
    stacks = [
        engine_stack(target, folder, settings, name)
        for folder, name in zip(folders, names, strict=True)
    ]
    if request.no_draft:
        stacks.append(engine_stack(target, None, settings, PLAIN))
    return stacks


def _names(folders: list[Path]) -> tuple[str, str]:
    first, second = (folder.resolve().name for folder in folders)
    if first == second:
        first, second = (f"{f.resolve().parent.name}/{f.resolve().name}" for f in folders)
    return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def _identities(turns: dict[str, list[Turn]], temperature: float) -> list[Identity]:
    if temperature > 0:
        return []
    names = list(turns)
    couples = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    found = [identity_of(turns[a], turns[b], (a, b)) for a, b in couples]
    return [identity for identity in found if identity is not None]


def _compare_files(a: Path, b: Path) -> tuple[Comparison, list[SuiteResults]]:
    results = [read_suite(a), read_suite(b)]
    names = (a.stem, b.stem) if a.stem != b.stem else (str(a), str(b))
    logs = [_answers(path, own) for path, own in zip((a, b), results, strict=True)]
    identities: Identities = {}
    notices = [
        "Measured apart, not interleaved: a drift of the machine is in the speeds, though not in "
        "acceptance."
    ]
    if None not in logs:
        for arm in results[0].arms:
            if arm.temperature == 0:
                own = [[t for t in log or () if t.task == arm.task] for log in logs]
                found = identity_of(own[0], own[1], names)
                identities[arm.task, 0.0] = [] if found is None else [found]
    return compare_results(results[0], results[1], names, identities, notices), results


def _answers(path: Path, results: SuiteResults) -> list[Turn] | None:
    """The answers beside results; None where they are not there any more."""
    if results.answers is None:
        return None
    try:
        return read_answers(path.with_name(results.answers))[1]
    except ArtifactError:
        return None


def _results(
    request: CompareRequest,
    settings: SuiteSettings,
    stack: Stack,
    arms: list[ArmFigures],
    missing: dict[str, str],
    log: AnswerLog,
) -> SuiteResults:
    out = None if request.out is None else request.out / f"{_slug(stack.name)}.json"
    own = replace(request.suite, out=out, page=None)
    return results_of(own, settings, stack, arms, missing, log)


def _place(request: CompareRequest, stack: Stack) -> Path | None:
    if request.out is None:
        return None
    request.out.mkdir(parents=True, exist_ok=True)
    return request.out / f"{_slug(stack.name)}{ANSWERS}"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-")


def write_comparison(out: Path, comparison: Comparison, results: list[SuiteResults]) -> None:
    """comparison.json and comparison.html in ``out``.

    Raises:
        StorageError: not writable.
        MissingDependencyError: matplotlib is not installed.
    """
    atomic_json(out / "comparison.json", comparison.model_dump(mode="json", by_alias=True))
    atomic_write(out / "comparison.html", render_comparison(comparison, results))


def comparison_json(comparison: Comparison) -> str:
    """For programs: the comparison, and the averages of its lowest temperature at the top."""
    data = comparison.model_dump(mode="json", by_alias=True)
    if comparison.overall:
        data |= {
            "ratio_of_means": comparison.overall[0].ratio_of_means,
            "mean_of_ratios": comparison.overall[0].mean_of_ratios,
        }
    return json.dumps(data, indent=2)
