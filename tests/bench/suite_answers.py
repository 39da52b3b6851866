"""Answers made by hand, for tests of figures and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.bench.figures.arm import arm_figures
from dspark.bench.figures.schema import ArmFigures, SuiteResults
from dspark.bench.play.play import Arm
from dspark.bench.play.settings import SuiteSettings
from dspark.bench.play.turn import Accepted, Answer, Turn
from dspark.bench.tasks.task import task_named

BLOCK = 3


def counts(steps: Sequence[int], block: int = BLOCK, *, told: bool = True) -> Accepted:
    """``steps``: accepted tokens of every step of a block that was verified whole."""
    at = tuple(sum(n > slot for n in steps) for slot in range(block))
    return Accepted(
        steps=len(steps),
        drafted=block * len(steps),
        admitted=block * len(steps),
        accepted=sum(steps),
        accepted_at=at,
        admitted_at=(len(steps),) * block,
        per_step=tuple(steps) if told else None,
    )


def answer(steps: Sequence[int] | None, **other: Any) -> Answer:
    """An answer of as many tokens as its steps give, one from the prompt included."""
    tokens = 1 + sum(n + 1 for n in steps or ())
    fields: dict[str, Any] = {
        "text": "text",
        "ids": tuple(range(tokens)),
        "tokens": tokens,
        "prompt_tokens": 100,
        "finish": "stop",
        "first": 0.5,
        "seconds": 1.5,
        "accepted": None if steps is None else counts(steps),
        "source": "none" if steps is None else "engine",
    }
    return Answer(**(fields | other))


def turn(name: str, given: Answer | None, **other: Any) -> Turn:
    fields: dict[str, Any] = {
        "task": "mt_bench",
        "question": f"mt_bench/{name}",
        "key": f"key-{name}",
        "category": "writing",
        "turn": 0,
        "temperature": 0.0,
        "answer": given,
        "error": None if given is not None else "endpoint: HTTP 500",
    }
    return Turn(**(fields | other))


def arm(turns: Sequence[Turn], temperature: float = 0.0, **other: Any) -> Arm:
    asked = len({t.question for t in turns})
    return Arm(task_named("mt_bench"), temperature, asked, list(turns), seconds=10.0, **other)


def figures(turns: Sequence[Turn], temperature: float = 0.0, **other: Any) -> ArmFigures:
    made = arm(turns, temperature, **other)
    return arm_figures(made, SuiteSettings(), "a test", 80)


def results(name: str, *arms: ArmFigures, **other: Any) -> SuiteResults:
    fields: dict[str, Any] = {
        "schema": "dspark-suite/1",
        "suite": "quick",
        "name": name,
        "settings": SuiteSettings(),
        "stack": {"engine": "dspark", "target": "a target"},
        "draft": {"kind": "k3"},
        "made": {
            "command": "dspark bench",
            "commit": "abc",
            "machine": {"device": "x", "cores": 2},
        },
        "arms": arms,
    }
    return SuiteResults(**(fields | other))
