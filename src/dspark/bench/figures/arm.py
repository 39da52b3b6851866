"""From the turns of one arm to its figures, and to the sentences a reader needs beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from dspark.bench.figures.acceptance import Counted, add_up, ratios
from dspark.bench.figures.schema import (
    Acceptance,
    ArmFigures,
    PromptRow,
    Quality,
    SpeedFigures,
    Spread,
)
from dspark.bench.play.counters import difference, foreign_traffic
from dspark.bench.play.play import Arm
from dspark.bench.play.settings import SuiteSettings
from dspark.bench.play.turn import Accepted, Answer, Turn, Where

CONTEXTS = (1024, 4096, 16384, 32768, 65536, 131072)
POSITIONS = (32, 128, 512, 2048)
TRUNCATED = "length"


def arm_figures(
    arm: Arm,
    settings: SuiteSettings,
    rows_from: str,
    available: int,
    graded: dict[str, bool | None] | None = None,
) -> ArmFigures:
    """All figures of one arm.

    Args:
        rows_from: where its questions are from.
        available: how many the task has.
        graded: per question whether its answer is right, None where it could not be read; only
            questions that could be graded.
    """
    answered = [t for t in arm.turns if t.answer is not None]
    answers = [t.answer for t in answered if t.answer is not None]
    failed = [t for t in arm.turns if t.answer is None]
    acceptance, source, notices = _acceptance(arm, answered, settings.seed)
    counted = _counted(answered)
    return ArmFigures(
        task=arm.task.name,
        title=arm.task.title,
        task_hash=arm.task.hash,
        rows_from=rows_from,
        temperature=arm.temperature,
        top_p=settings.top_p if arm.temperature > 0 else 1.0,
        max_tokens=settings.max_tokens or arm.task.max_tokens,
        asked=arm.asked,
        available=available,
        turns=len(arm.turns),
        failed=len(failed),
        timed_out=sum(t.timed_out for t in failed),
        truncated=sum(_cut(t) for t in answered),
        tokens=sum(a.tokens or 0 for a in answers),
        prompt_tokens=sum(a.prompt_tokens or 0 for a in answers),
        source=source,
        acceptance=acceptance,
        speed=_speed(arm, answers),
        quality=_quality(arm, graded),
        by_category=_by(counted, settings.seed, lambda t: t.category),
        by_turn=_by(counted, settings.seed, lambda t: f"turn {t.turn + 1}"),
        by_context=_by(counted, settings.seed, _context),
        by_position=_positions(answered, settings.seed),
        notices=(*notices, *_told(arm, failed, answers)),
        prompts=tuple(_rows(arm, graded or {})),
    )


def _counted(turns: Sequence[Turn]) -> list[tuple[Turn, Counted]]:
    return [
        (t, Counted(t.question, t.answer.accepted, t.answer.tokens))
        for t in turns
        if t.answer is not None and t.answer.accepted is not None
    ]


def _acceptance(
    arm: Arm, answered: Sequence[Turn], seed: int
) -> tuple[Acceptance | None, Where, list[str]]:
    """Per answer where every answer tells, else by the server's counters around the arm."""
    counted = _counted(answered)
    if answered and len(counted) == len(answered):
        sources = {t.answer.source for t in answered if t.answer is not None}
        if len(sources) == 1:
            return add_up([c for _, c in counted], seed), sources.pop(), []
        return None, "none", [f"Answers tell acceptance in different ways: {sorted(sources)}."]
    if arm.before is None or arm.after is None:
        text = "The server tells nothing about drafting: no acceptance."
        if counted:
            text = (
                f"Only {len(counted)} of {len(answered)} answers tell their acceptance: no figure."
            )
        return None, "none", [text] if answered else []
    moved = difference(arm.before, arm.after)
    if moved is None:
        text = "The server's counters were reset or contradict each other: no acceptance."
        return None, "none", [text]
    if arm.resumed:
        text = "Taken up from an earlier process, so the server's counters cover a part only"
        return None, "none", [f"{text}: no acceptance."]
    tokens = sum(t.answer.tokens or 0 for t in answered if t.answer is not None)
    failed = len(arm.turns) - len(answered)
    block = -(-moved.accepted.drafted // max(1, moved.accepted.steps))
    why = foreign_traffic(moved, len(answered), tokens, block)
    if why is not None or failed:
        why = why or f"{failed} requests failed, whose steps the server counted too"
        return None, "none", [f"The server's counters are not of these answers alone: {why}."]
    prompts = len({t.question for t in answered})
    told = "Acceptance is from the server's counters: no intervals, no figures by prompt."
    return ratios(moved.accepted, prompts), moved.source, [told]


def _by(
    counted: Sequence[tuple[Turn, Counted]], seed: int, name: Callable[[Turn], str]
) -> dict[str, Acceptance]:
    groups: dict[str, list[Counted]] = defaultdict(list)
    for turn, part in counted:
        groups[name(turn)].append(part)
    if len(groups) < 2 and name is not _context:
        return {}  # the whole arm once more
    made = {key: add_up(parts, seed) for key, parts in sorted(groups.items())}
    return {key: value for key, value in made.items() if value is not None}


def _context(turn: Turn) -> str:
    tokens = turn.answer.prompt_tokens if turn.answer is not None else None
    return "unknown" if tokens is None else bucket(tokens, CONTEXTS)


def bucket(value: int, edges: Sequence[int]) -> str:
    """The name of the bucket ``value`` is in: ``1024-4095``; sorts by size within one list."""
    low = 0
    for edge in edges:
        if value < edge:
            return f"{low}-{edge - 1}"
        low = edge
    return f"{low}+"


def _positions(turns: Sequence[Turn], seed: int) -> dict[str, Acceptance]:
    """By where in the answer a step began; only of answers that tell every step."""
    groups: dict[str, list[Counted]] = defaultdict(list)
    for turn in turns:
        accepted = turn.answer.accepted if turn.answer is not None else None
        if accepted is None or accepted.per_step is None:
            continue
        place = 1  # the first token is the prompt's own
        for count in accepted.per_step:
            step = Accepted(steps=1, drafted=max(1, count), accepted=count)
            groups[bucket(place, POSITIONS)].append(Counted(turn.question, step))
            place += count + 1
    made = {}
    for key in sorted(groups, key=lambda k: int(k.rstrip("+").split("-")[0])):
        found = add_up(groups[key], seed)
        if found is not None:
            # What was drafted is not told step by step.
            made[key] = found.model_copy(update={"rate_drafted": None, "drafted": 0})
    return made


def _speed(arm: Arm, answers: Sequence[Answer]) -> SpeedFigures | None:
    """None where a part of the answers came from an earlier process, at other times."""
    if not answers or arm.resumed:
        return None
    tokens = sum(a.tokens or 0 for a in answers)
    single = [a.tokens / a.seconds for a in answers if a.tokens and a.seconds]
    each = [
        (a.seconds - a.first) / (a.tokens - 1)
        for a in answers
        if a.first is not None and a.tokens is not None and a.tokens > 1
    ]
    return SpeedFigures(
        seconds=arm.seconds,
        tokens_per_second=tokens / arm.seconds if arm.seconds else None,
        per_request=sum(single) / len(single) if single else None,
        first=_spread([a.first for a in answers if a.first is not None]),
        each=_spread([max(0.0, value) for value in each]),
    )


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p99 = (float(v) for v in np.quantile(values, [0.5, 0.9, 0.99]))
    return Spread(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def _quality(arm: Arm, graded: dict[str, bool | None] | None) -> Quality | None:
    if not graded or arm.task.grade is None:
        return None
    return Quality(
        grader=arm.task.grade,
        graded=len(graded),
        right=sum(right is True for right in graded.values()),
        unreadable=sum(right is None for right in graded.values()),
        cut=len({t.question for t in arm.turns if _cut(t)} & set(graded)),
    )


def _cut(turn: Turn) -> bool:
    return turn.answer is not None and turn.answer.finish == TRUNCATED


def _told(arm: Arm, failed: Sequence[Turn], answers: Sequence[Answer]) -> list[str]:
    notices = []
    if failed:
        first = failed[0].error
        late = sum(t.timed_out for t in failed)
        notices.append(
            f"{len(failed)} of {len(arm.turns)} turns failed ({late} by timeout), for example: "
            f"{first}"
        )
    if cut := sum(a.finish == TRUNCATED for a in answers):
        notices.append(f"{cut} of {len(answers)} answers were cut at the limit of tokens.")
    told = [a.accepted for a in answers if a.accepted is not None]
    if told and not any(accepted.drafted for accepted in told):
        notices.append("Nothing was drafted: this is plain decoding.")
    if arm.resumed:
        notices.append(f"{arm.resumed} turns are of an earlier process: no speed is given.")
    return notices


def _rows(arm: Arm, graded: dict[str, bool | None]) -> list[PromptRow]:
    questions: dict[str, list[Turn]] = {}
    for turn in arm.turns:
        questions.setdefault(turn.question, []).append(turn)
    return [_row(turns, graded) for turns in questions.values()]


def _row(turns: Sequence[Turn], graded: dict[str, bool | None]) -> PromptRow:
    answers = [t.answer for t in turns if t.answer is not None]
    told = [a.accepted for a in answers if a.accepted is not None]
    whole = bool(answers) and len(told) == len(answers)
    prompt = [a.prompt_tokens for a in answers]
    return PromptRow(
        id=turns[0].question,
        key=turns[0].key,
        category=turns[0].category,
        turns=len(turns),
        tokens=sum(a.tokens or 0 for a in answers),
        prompt_tokens=prompt[-1] if prompt else None,
        truncated=sum(a.finish == TRUNCATED for a in answers),
        steps=sum(c.steps for c in told) if whole else None,
        drafted=sum(c.drafted for c in told) if whole else None,
        accepted=sum(c.accepted for c in told) if whole else None,
        digests=tuple(a.digest for a in answers),
        right=graded.get(turns[0].question),
        error=next((t.error for t in turns if t.error is not None), None),
    )
