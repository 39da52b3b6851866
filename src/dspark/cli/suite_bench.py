"""``dspark bench DRAFT --suite quick`` and ``dspark bench --base-url URL``: measure a suite.

Results go to ``--out`` as JSON and the answers beside it as ``.answers.jsonl``, line by line while
they come: the same command goes on where it was cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_json, atomic_write, sha256_file
from dspark.bench.figures.arm import arm_figures
from dspark.bench.figures.page import render_suite
from dspark.bench.figures.schema import ArmFigures, SuiteResults
from dspark.bench.grade.grade import grade, require_grader
from dspark.bench.play.log import AnswerLog
from dspark.bench.play.play import Arm, play_arm, warm_up
from dspark.bench.play.settings import SuiteSettings, settings_from
from dspark.bench.tasks.long import (
    LENGTHS,
    MOST_TOKENS,
    counter_from_probe,
    long_questions,
    long_task,
    probe_text,
)
from dspark.bench.tasks.questions import Question, spread
from dspark.bench.tasks.task import Task, suite_named, task_named
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import command_line, origin_of
from dspark.cli.suite_stack import Stack, engine_stack, server_stack
from dspark.cli.task_rows import load_questions
from dspark.errors import ConfigError, DataError, MissingDependencyError

ANSWERS = ".answers.jsonl"
FEW = 10
# Settings that decide no answer: a run may go on with others.
UNIMPORTANT = ("tries", "timeout", "grade", "skip_missing", "concurrency", "note")


@dataclass(frozen=True)
class SuiteRequest:
    """What the user asked for; exactly one of ``draft`` and ``url``."""

    draft: Path | None
    url: str | None
    suite: str | None
    tasks: tuple[str, ...] = ()
    data: Path | None = None
    out: Path | None = None
    page: Path | None = None
    target: str | None = None
    model: str | None = None
    long: bool = False
    plan: bool = False


@dataclass(frozen=True)
class Planned:
    """One task ready to be asked. ``available`` is how many questions it has in all."""

    task: Task
    questions: list[Question]
    available: int
    rows_from: str


def bench_suite(request: SuiteRequest, overrides: list[str], screen: Screen) -> SuiteResults | None:
    """Measure and write; None with ``plan``, which only says what would be asked.

    Raises:
        ConfigError: options that do not go together.
        DataError: a task's data is not at hand (see ``skip_missing``).
        EndpointError: the server is gone; answers so far are kept with ``out``.
    """
    settings = with_suite(settings_from(overrides), request.suite)
    planned, missing = plan_tasks(request, settings, screen)
    if request.plan:
        _show_plan(planned, settings, screen)
        return None
    return asyncio.run(_measure(request, settings, planned, missing, screen))


def with_suite(settings: SuiteSettings, suite: str | None) -> SuiteSettings:
    """A suite's own limit of tokens, where the user gives none."""
    if suite is None or settings.max_tokens is not None:
        return settings
    return settings.model_copy(update={"max_tokens": suite_named(suite).max_tokens})


def plan_tasks(
    request: SuiteRequest, settings: SuiteSettings, screen: Screen
) -> tuple[list[Planned], dict[str, str]]:
    """Every task of suite and list with its questions, and why others cannot be asked.

    Raises:
        DataError, MissingDependencyError: the first task that is not at hand, unless
            ``skip_missing``.
    """
    suite = None if request.suite is None else suite_named(request.suite)
    names = dict.fromkeys([*(suite.tasks if suite else ()), *request.tasks])
    planned, missing = [], {}
    for name in names:
        task = task_named(name)
        try:
            questions, rows_from = load_questions(task, request.data)
            if settings.grade:
                require_grader(task, questions)
        except (DataError, MissingDependencyError) as error:
            if not settings.skip_missing:
                raise
            missing[name] = f"{error.found}. {error.fix}"
            screen.stage("not run", f"{task.title}: {error.found}")
            continue
        limits = [n for n in (settings.prompts, suite.prompts.get(name) if suite else None) if n]
        chosen = spread(questions, min(limits)) if limits else questions
        planned.append(Planned(task, chosen, len(questions), rows_from))
    if not planned and not request.long:
        raise ConfigError(
            expected="a suite, or tasks, with at least one whose data is at hand",
            found=f"{len(missing)} without data" if missing else "none named",
            where="dspark bench",
            fix="For example: --suite quick, which needs no network.",
        )
    return planned, missing


@asynccontextmanager
async def opened(
    request: SuiteRequest, settings: SuiteSettings, screen: Screen
) -> AsyncIterator[Stack]:
    """The stack that is asked."""
    if request.url is not None:
        async with server_stack(request.url, request.model, settings, request.url) as stack:
            yield stack
        return
    assert request.draft is not None
    longest = LENGTHS[-1] if request.long else None
    target = load_target_of(request.draft, request.target, screen, max_context=longest)
    folder = request.draft.resolve()
    yield engine_stack(target, request.draft, settings, f"{folder.parent.name}/{folder.name}")


async def _measure(
    request: SuiteRequest,
    settings: SuiteSettings,
    planned: list[Planned],
    missing: dict[str, str],
    screen: Screen,
) -> SuiteResults:
    async with opened(request, settings, screen) as stack:
        if request.long:
            planned = [*planned, *await long_planned(stack, settings, missing)]
        if not planned:
            raise DataError(
                expected=f"a context of at least {LENGTHS[0]} tokens, for the shortest length",
                found="; ".join(missing.values()),
                where="dspark bench --long",
                fix="Measure a target with a longer context.",
            )
        out = request.out
        log = AnswerLog(
            None if out is None else out.with_suffix(ANSWERS), head_of(stack, settings, planned)
        )
        if log.resumed:
            screen.stage("resume", f"{log.resumed} answers of an earlier process are kept")
        first = planned[0]
        await warm_up(stack.player, first.task, first.questions, settings)
        arms = []
        total = len(settings.temperatures) * sum(len(p.questions) for p in planned)
        with screen.bar("questions", total) as bar:
            for plan in planned:
                for temperature in settings.temperatures:
                    arm = await play_arm(
                        stack.player, plan.task, plan.questions, temperature, settings, log,
                        bar.advance,
                    )  # fmt: skip
                    arms.append(finished_arm(arm, plan, settings))
        return results_of(request, settings, stack, arms, missing, log)


def finished_arm(arm: Arm, plan: Planned, settings: SuiteSettings) -> ArmFigures:
    """Graded and added up."""
    graded = grade(plan.task, plan.questions, arm.turns) if settings.grade else None
    return arm_figures(arm, settings, plan.rows_from, plan.available, graded)


def head_of(stack: Stack, settings: SuiteSettings, planned: Sequence[Planned]) -> dict[str, Any]:
    """What answers of one log have in common."""
    return {
        "stack": stack.fingerprint,
        "draft": stack.draft,
        "settings": settings.model_dump(mode="json", exclude=set(UNIMPORTANT)),
        "tasks": {p.task.name: p.task.hash for p in planned},
    }


def results_of(
    request: SuiteRequest,
    settings: SuiteSettings,
    stack: Stack,
    arms: Sequence[ArmFigures],
    missing: dict[str, str],
    log: AnswerLog,
) -> SuiteResults:
    """The results, written where ``--out`` and ``--page`` say."""
    origin = origin_of(command_line())
    answers = log.path
    results = SuiteResults(
        schema="dspark-suite/1",
        suite=request.suite or ("long" if request.long else "tasks"),
        name=stack.name,
        settings=settings,
        stack=stack.fingerprint,
        draft=stack.draft,
        made=origin.model_dump(mode="json"),
        arms=tuple(arms),
        missing=missing,
        answers=None if answers is None else answers.name,
        answers_sha256=None if answers is None else sha256_file(answers)[1],
        notices=(*stack.player.notices, *_told(stack, settings, arms)),
    )
    if request.out is not None:
        atomic_json(request.out, results.model_dump(mode="json", by_alias=True))
    if request.page is not None:
        atomic_write(request.page, render_suite(results))
    return results


def _told(stack: Stack, settings: SuiteSettings, arms: Sequence[ArmFigures]) -> list[str]:
    notices = [settings.note] if settings.note else []
    if any(t > 0 for t in settings.temperatures):
        method = stack.fingerprint.get("draft_sample_method")
        if method == "greedy":
            notices.append(
                "Drafts are argmax: above T = 0 they are accepted less often than sampled ones."
            )
        elif method is None:
            notices.append(
                "The server does not tell how it samples drafts: above T = 0 figures depend on it."
            )
    if any(a.acceptance and a.acceptance.prompts < FEW for a in arms):
        notices.append(f"Intervals over fewer than {FEW} prompts are rough.")
    if settings.concurrency > 1:
        notices.append(
            f"{settings.concurrency} requests at once: times of single answers include waiting."
        )
    return notices


async def long_planned(
    stack: Stack, settings: SuiteSettings, missing: dict[str, str]
) -> list[Planned]:
    """Prompts of every length that fits; the others go to ``missing``."""
    count = stack.count
    if count is None:
        text = probe_text()
        probe = Planned(
            long_task(LENGTHS[0]), [Question("probe", "probe", "probe", (text,))], 1, ""
        )
        answer = await warm_up(
            stack.player, probe.task, probe.questions, settings.model_copy(update={"warm_up": 1})
        )
        if answer is None or not answer.prompt_tokens:
            missing["long"] = "The server does not count the tokens of a prompt."
            return []
        count = counter_from_probe(text, answer.prompt_tokens)
    planned = []
    for length in LENGTHS:
        task = long_task(length)
        if stack.context is not None and length > stack.context:
            missing[task.name] = f"Beyond the context of {stack.context} tokens."
            continue
        questions = long_questions(length, count)
        planned.append(Planned(task, questions, len(questions), "generator ledger"))
    if not planned and not missing:
        missing["long"] = f"No length leaves room for {MOST_TOKENS} tokens."
    return planned


def _show_plan(planned: Sequence[Planned], settings: SuiteSettings, screen: Screen) -> None:
    total = 0
    for plan in planned:
        turns = sum(len(q.turns) for q in plan.questions) * len(settings.temperatures)
        most = turns * (settings.max_tokens or plan.task.max_tokens)
        total += most
        screen.stage(
            plan.task.name,
            f"{len(plan.questions)} of {plan.available} questions, {turns} answers of all "
            f"temperatures, at most {most:,} tokens; {plan.rows_from}",
        )
    screen.stage("plan", f"at most {total:,} tokens in all; nothing was run")


def read_suite(path: Path) -> SuiteResults:
    """Results from a file.

    Raises:
        ArtifactError: missing, damaged, or of another kind.
    """
    from dspark.bench.results import read_results

    return read_results(path, SuiteResults)


def as_json(results: SuiteResults) -> str:
    """For programs."""
    return json.dumps(results.model_dump(mode="json", by_alias=True), indent=2)
