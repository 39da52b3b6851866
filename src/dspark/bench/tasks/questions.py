"""From rows to questions: what is asked, exactly, and never fewer of them than promised.

Everything a source can be short of is refused here: a row too few or too many, a placeholder in
place of a text, a field that is not there. Which rows are taken depends on the definition alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dspark.bench.tasks.task import Rule, Task
from dspark.errors import DataError

Row = tuple[str, dict[str, Any]]
PLACEHOLDERS = ("FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE",)
_FIELD = re.compile(r"\{([a-z_]+)\}")
# Graders need these of a row; files that only have turns do not have them.
_GRADED_WITH = {
    "human_eval": ("prompt", "test", "entry_point"),
    "python_asserts": ("test_list",),
}


@dataclass(frozen=True)
class Question:
    """One prompt: ``turns`` are the user's, asked one after the other.

    ``id`` is unique within its task; two sources may name one prompt differently, so results are
    paired by :attr:`key`. ``check`` holds what a grader needs, and is empty without an answer.
    """

    task: str
    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    opening: tuple[dict[str, str], ...] = ()
    check: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """16 hex digits of the sha256 of everything that is asked."""
        asked = [self.task, self.system, list(self.opening), self.turns]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def questions_of(task: Task, rows: Iterable[Row]) -> list[Question]:
    """The questions of a task in its own order.

    Args:
        rows: ``(place, row)``, all of the source.

    Raises:
        DataError: another number of rows than the definition promises, a placeholder, a row
            without the fields that make a prompt, or two rows of one id. Says how to get the data.
    """
    kept = [(where, row) for where, row in rows if _matches(task.rule, row)]
    if task.rule.whole_rows_only:
        kept = [(where, row) for where, row in kept if not _placeholder(task, row)]
    for where, row in kept:
        if _placeholder(task, row):
            _refuse(task, "rows with their text", "a placeholder in place of it", where)
    available, least = task.rule.available, task.rule.count
    if len(kept) != (available or len(kept)) or len(kept) < least:
        wanted = f"{available} rows" if available else f"at least {least} rows"
        chosen = f" with {task.rule.where}" if task.rule.where else ""
        _refuse(task, f"{wanted}{chosen}", f"{len(kept)}", f"task {task.name}")
    asked = [
        _question(task, where, row, number) for number, (where, row) in enumerate(kept, start=1)
    ]
    seen: set[str] = set()
    for question in asked:
        if question.id in seen:
            _refuse(task, "rows of different ids", f"{question.id} twice", f"task {task.name}")
        seen.add(question.id)
    return chosen_of(task.rule, asked)


def chosen_of(rule: Rule, asked: Sequence[Question]) -> list[Question]:
    """``rule.count`` of all questions, in file order."""
    if rule.select in {"all", "first"}:
        return list(asked[: rule.count])
    if rule.select == "spread":
        return spread(asked, rule.count)
    ranked = sorted(
        range(len(asked)),
        key=lambda i: hashlib.sha256(f"{rule.seed}/{asked[i].id}".encode()).hexdigest(),
    )
    return [asked[i] for i in sorted(ranked[: rule.count])]


def spread(asked: Sequence[Question], count: int) -> list[Question]:
    """``count`` questions at even distances (files are sorted by subject), all if there are fewer.

    Raises:
        DataError: ``count`` below 1.
    """
    if count < 1:
        raise DataError(
            expected="at least one prompt of a task",
            found=f"{count}",
            where="bench.prompts",
            fix="Ask for more, or leave the limit out.",
        )
    if count >= len(asked):
        return list(asked)
    return [asked[i * len(asked) // count] for i in range(count)]


def _matches(rule: Rule, row: dict[str, Any]) -> bool:
    # A file that holds only the wanted rows need not repeat the field they were chosen by.
    return all(str(row.get(name, value)) == value for name, value in rule.where.items())


def _texts(task: Task, row: dict[str, Any]) -> Iterator[str]:
    turns = row.get("turns")
    if isinstance(turns, list):
        yield from (t for t in turns if isinstance(t, str))
    elif task.prompt.format is not None:
        yield from (str(row.get(name, "")) for name in _FIELD.findall(task.prompt.format))


def _placeholder(task: Task, row: dict[str, Any]) -> bool:
    return any(mark in text for text in _texts(task, row) for mark in PLACEHOLDERS)


def _question(task: Task, where: str, row: dict[str, Any], number: int) -> Question:
    turns = _turns(task, where, row)
    if task.turns and len(turns) != task.turns:
        _refuse(task, f"{task.turns} turns", f"{len(turns)}", where)
    if any(not turn.strip() for turn in turns):
        _refuse(task, "turns that ask something", "an empty one", where)
    own = None if task.id_field is None else row.get(task.id_field)
    category = None if task.category_field is None else row.get(task.category_field)
    opening = row.get("opening") or []
    return Question(
        task=task.name,
        id=f"{task.name}/{number:04d}" if own is None else f"{task.name}/{own}",
        category=str(category or task.name),
        turns=turns,
        system=row.get("system") or task.prompt.system,
        opening=tuple(dict(message) for message in opening),
        check=_check(task, row),
    )


def _turns(task: Task, where: str, row: dict[str, Any]) -> tuple[str, ...]:
    """A list of turns in the row wins: it is what ``--data`` files hold, already formatted."""
    name = task.prompt.turns or "turns"
    given = row.get(name)
    if isinstance(given, list) and given and all(isinstance(turn, str) for turn in given):
        return tuple(given)
    if task.prompt.format is None:
        _refuse(task, f"{name}: a list of texts", f"{given!r:.60}", where)
    values = {}
    for field_name in dict.fromkeys(_FIELD.findall(task.prompt.format)):
        value = row.get(task.prompt.fields.get(field_name, field_name))
        if not isinstance(value, str | int | float):
            _refuse(task, f"the field {field_name}", f"{value!r:.60}", where)
        values[field_name] = str(value).strip("\n")
    return (_FIELD.sub(lambda m: values[m.group(1)], task.prompt.format),)


def _check(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    if task.grade in {"number", "math"} and task.answer_field in row:
        return {"answer": str(row[task.answer_field])}
    wanted = _GRADED_WITH.get(task.grade or "", ())
    if wanted and all(name in row for name in wanted):
        extra = {"test_imports": row["test_imports"]} if row.get("test_imports") else {}
        return {**{name: row[name] for name in wanted}, **extra}
    return {}


def _refuse(task: Task, expected: str, found: str, where: str) -> NoReturn:
    raise DataError(
        expected=expected,
        found=found,
        where=f"{task.title}: {where}",
        fix=" ".join(task.how_to_get.split()),
    )
