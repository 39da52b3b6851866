"""Exact match for mathematics, unit tests for code.

Not a leaderboard of models: prompts are bare and answers are cut. It guards against an engine that
is fast because it is wrong, and two arms of one comparison should score alike.

Formulas are compared by ``math-verify``; code runs in :mod:`dspark.bench.grade.sandbox`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dspark.bench.grade.sandbox import Verdict, run_python
from dspark.bench.play.turn import Turn
from dspark.bench.tasks.questions import Question
from dspark.bench.tasks.task import Task
from dspark.errors import optional_module

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def gradable(task: Task, questions: Sequence[Question]) -> list[Question]:
    """Questions whose data holds what a grader needs."""
    return [q for q in questions if q.check] if task.grade is not None else []


def require_grader(task: Task, questions: Sequence[Question]) -> None:
    """Refuse before hours of work what could not be graded at their end.

    Raises:
        MissingDependencyError: math-verify is not installed, and a question needs it.
    """
    if task.grade == "math" and gradable(task, questions):
        _math_verify()


def grade(
    task: Task,
    questions: Sequence[Question],
    turns: Sequence[Turn],
    on_question: Callable[[], None] = lambda: None,
) -> dict[str, bool | None]:
    """Per gradable and answered question: right, wrong, or None where no answer could be read."""
    last = {t.question: t.answer for t in turns if t.answer is not None}
    found: dict[str, bool | None] = {}
    for question in gradable(task, questions):
        answer = last.get(question.id)
        if answer is None:
            continue
        found[question.id] = _GRADERS[str(task.grade)](question, answer.text)
        on_question()
    return found


def right_number(question: Question, text: str) -> bool | None:
    """GSM8K: the boxed number, else the last number of the answer, against the one behind ####."""
    wanted = _float(question.check["answer"].rsplit("####", 1)[-1])
    boxed = _BOXED.findall(text)
    places = _NUMBER.findall(boxed[-1]) if boxed else _NUMBER.findall(text)
    if not places or wanted is None:
        return None
    found = _float(places[-1])
    return found is not None and abs(found - wanted) < 1e-6


def right_formula(question: Question, text: str) -> bool | None:
    """MATH and AIME: equality as math-verify sees it."""
    library = _math_verify()
    # Its limits are alarms, which only the main thread may set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    wanted = library.parse(f"\\boxed{{{question.check['answer']}}}", parsing_timeout=limit)
    found = library.parse(text, parsing_timeout=limit)
    if not found:
        return None
    return bool(library.verify(wanted, found, timeout_seconds=limit))


def right_human_eval(question: Question, text: str) -> bool | None:
    """HumanEval: the function of the answer passes the tests that come with the question."""
    code = code_of(text)
    if code is None:
        return None
    prompt, entry = question.check["prompt"], question.check["entry_point"]
    # Answers that only continue the function are put behind its head.
    program = code if f"def {entry}" in code else f"{prompt}{code}"
    imports = "\n".join(line for line in prompt.splitlines() if line.startswith(("import", "from")))
    test = f"{question.check['test']}\n\ncheck({entry})\n"
    return run_python(f"{imports}\n{program}\n\n{test}") is Verdict.passed


def right_asserts(question: Question, text: str) -> bool | None:
    """MBPP: the code of the answer passes the listed asserts."""
    code = code_of(text)
    if code is None:
        return None
    tests = "\n".join([*question.check.get("test_imports", []), *question.check["test_list"]])
    return run_python(f"{code}\n\n{tests}\n") is Verdict.passed


def code_of(text: str) -> str | None:
    """The longest fenced block of an answer, or the whole of one that looks like code."""
    blocks = [str(b) for b in _FENCE.findall(text)]
    if blocks:
        return max(blocks, key=len)
    return text if re.search(r"^\s*(def|class|return|import|from)\b", text, re.MULTILINE) else None


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip())
    except ValueError:
        return None


def _math_verify() -> Any:
    return optional_module(
        "math_verify",
        expected="the package math-verify, to compare formulas",
        where="grading",
        fix="pip install 'dspark[bench]', or measure without grading: grade=false",
    )


_GRADERS: dict[str, Callable[[Question, str], bool | None]] = {
    "number": right_number,
    "math": right_formula,
    "human_eval": right_human_eval,
    "python_asserts": right_asserts,
}
