"""Benchmarks as items that training prompts must not contain (``filters.contamination.tasks``).

The definitions are those of ``dspark.bench.tasks``, and the rows come from where the bench takes
them: the folder ``filters.contamination.data``, an installed package, the hub.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dspark.bench.tasks.task import task_named, tasks
from dspark.cli.task_rows import load_questions
from dspark.config.prompts import PromptsSection
from dspark.data.filters.evaluation import EvalItem, TaskItems
from dspark.data.filters.wrappers import unwrapped
from dspark.errors import DataError


def task_items(section: PromptsSection) -> TaskItems | None:
    """Items of the benchmarks that the recipe names; None where it names none.

    With ``all``, benchmarks that are not at hand are left out and told about.

    Raises:
        ConfigError: a name that is none of ours.
        DataError: a benchmark that the recipe names is not at hand, or not what it should be.
    """
    wanted = section.filters.contamination
    if wanted is None or not wanted.tasks:
        return None
    folder = None if wanted.data is None else Path(wanted.data)
    items: list[EvalItem] = []
    absent: list[str] = []
    identity: dict[str, str | None] = {}
    for task in tasks().values() if wanted.tasks == "all" else map(task_named, wanted.tasks):
        try:
            questions, _ = load_questions(task, folder)
        except DataError:
            if wanted.tasks != "all" or (folder is not None and not folder.exists()):
                raise
            absent.append(task.name)
            identity[task.name] = None
            continue
        own = [
            EvalItem(task.name, question.id, tuple(unwrapped(text) for text in question.turns))
            for question in questions
        ]
        items += own
        asked = json.dumps([[item.id, *item.texts] for item in own]).encode()
        identity[task.name] = hashlib.sha256(asked).hexdigest()
    return TaskItems(tuple(items), tuple(absent), identity)
