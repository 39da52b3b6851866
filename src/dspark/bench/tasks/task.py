"""Benchmarks as versioned data: one small YAML file each, in ``definitions/``.

Two acceptance lengths may only be compared when they were measured on the same prompts, asked in
the same way and cut at the same length. Published tables rarely say all of that, so everything that
decides it is written down here: where the rows are from and at which revision, which of them count,
how they become a prompt, how many turns are asked, where an answer is cut, whether the model is
told to think. Every result carries the hash of the definition it was measured with
(:attr:`Task.hash`); results of different hashes are never put in one row.

``count`` is a promise: a source that gives another number of rows is refused, never used quietly.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from dspark.config.architecture import Frozen
from dspark.config.faults import unknown_choice
from dspark.config.load import parse_yaml
from dspark.errors import ConfigError

Thinking = Literal["off", "on", "default"]
Grader = Literal["number", "math", "human_eval", "python_asserts"]
Selection = Literal["all", "first", "spread", "seeded"]


class HubRows(Frozen):
    """Rows of a data set on the Hugging Face hub, at one commit."""

    kind: Literal["hub"]
    dataset: str = Field(min_length=1)
    config: str | None = None
    split: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")


class HubFiles(Frozen):
    """Single files of a hub data set whose rows point into an archive of documents."""

    kind: Literal["hub_documents"]
    dataset: str = Field(min_length=1)
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    table: str
    archive: str
    archive_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PackageRows(Frozen):
    """A data file that an installed Python package ships; nothing of the package is imported."""

    kind: Literal["package"]
    distribution: str
    version: str
    file: str


class GeneratedRows(Frozen):
    """Rows that dspark makes itself, always the same ones."""

    kind: Literal["order_tickets"]
    seed: NonNegativeInt


Source = Annotated[HubRows | HubFiles | PackageRows | GeneratedRows, Field(discriminator="kind")]


class Rule(Frozen):
    """Which rows of the source are asked, stated so that anybody gets the same ones.

    ``available``: rows the source has after ``where`` (exact match of fields), None where only a
    least number (``count``) is known. ``select`` takes ``count`` of them: ``first``, ``spread`` at
    even distances, ``seeded`` by the order of sha256("seed/id"), or ``all``. ``whole_rows_only``
    leaves rows with a placeholder out before counting. ``text`` is the rule in words.
    """

    available: PositiveInt | None = None
    count: PositiveInt
    select: Selection = "all"
    seed: NonNegativeInt = 0
    where: dict[str, str] = Field(default_factory=dict)
    whole_rows_only: bool = False
    text: str = Field(min_length=1)

    @model_validator(mode="after")
    def _counts(self) -> Rule:
        if self.available is not None and self.count > self.available:
            raise ValueError(f"count {self.count} of {self.available} available rows")
        if self.select == "all" and self.count != self.available:
            raise ValueError("select all needs count = available")
        return self


class Prompting(Frozen):
    """How a row becomes turns. ``turns`` names a list field; else ``format`` is filled with fields.

    In ``format``, ``{name}`` is a field of the row (``fields`` renames them); nothing else is
    interpreted, so braces in the text need no doubling.
    """

    turns: str | None = None
    format: str | None = None
    fields: dict[str, str] = Field(default_factory=dict)
    system: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Prompting:
        if (self.turns is None) == (self.format is None):
            raise ValueError("exactly one of turns and format")
        return self


class Task(Frozen):
    """One benchmark. ``sources`` are tried in order: the first that is at hand is read.

    ``turns``: user turns of every prompt; 0 where prompts differ. ``max_tokens``: generated tokens
    of one turn at most. ``file`` is what it is called in a folder given with ``--data``.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str = Field(min_length=1)
    version: PositiveInt
    sources: tuple[Source, ...]
    file: str
    rule: Rule
    prompt: Prompting
    turns: NonNegativeInt
    max_tokens: PositiveInt
    thinking: Thinking = "off"
    id_field: str | None = None
    category_field: str | None = None
    answer_field: str | None = None
    grade: Grader | None = None
    context_tokens: tuple[PositiveInt, PositiveInt] | None = None
    licence: str = Field(min_length=1)
    notes: str = ""
    how_to_get: str = Field(min_length=1)

    @property
    def hash(self) -> str:
        """First 16 hex digits of the sha256 of everything that decides prompts and lengths."""
        deciding = self.model_dump(
            mode="json", exclude={"title", "notes", "licence", "how_to_get", "grade", "file"}
        )
        text = json.dumps(deciding, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Suite(Frozen):
    """A named list of tasks; ``prompts`` shortens every task to that many, at even distances."""

    name: str
    title: str
    tasks: tuple[str, ...] = Field(min_length=1)
    prompts: dict[str, PositiveInt] = Field(default_factory=dict)
    max_tokens: PositiveInt | None = None
    notes: str = ""


@cache
def tasks() -> dict[str, Task]:
    """All tasks by name.

    Raises:
        ConfigError: a definition that is not sound; the installation is damaged.
    """
    found = [_read(f, Task) for f in _files("task")]
    return {task.name: task for task in sorted(found, key=lambda t: t.name)}


@cache
def suites() -> dict[str, Suite]:
    """All suites by name. Raises as :func:`tasks`, and for a suite that names an unknown task."""
    found = {suite.name: suite for suite in (_read(f, Suite) for f in _files("suite"))}
    for suite in found.values():
        unknown = sorted((set(suite.tasks) | set(suite.prompts)) - set(tasks()))
        if unknown:
            raise _damaged(f"suite {suite.name}", f"unknown tasks {unknown}")
    return found


def task_named(name: str) -> Task:
    """One task.

    Raises:
        ConfigError: no such task; lists the known ones.
    """
    return _named(name, tasks(), "task")


def suite_named(name: str) -> Suite:
    """One suite.

    Raises:
        ConfigError: no such suite; lists the known ones.
    """
    return _named(name, suites(), "suite")


Named = TypeVar("Named", Task, Suite)


def _named(name: str, known: dict[str, Named], what: str) -> Named:
    if name not in known:
        raise unknown_choice(name, sorted(known), f"dspark bench --{what}")
    return known[name]


def _files(prefix: str) -> list[Any]:
    folder = importlib.resources.files("dspark.bench.tasks") / "definitions"
    names = sorted(f.name for f in folder.iterdir())
    return [folder / name for name in names if name.startswith(f"{prefix}-")]


def _read(file: Any, schema: type[Any]) -> Any:
    where = f"benchmark definition {file.name}"
    try:
        return schema.model_validate(parse_yaml(file.read_text(encoding="utf-8"), where))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _damaged(where, f"{place}: {first['msg']}") from error


def _damaged(where: str, found: str) -> ConfigError:
    return ConfigError(
        expected="a sound definition", found=found, where=where, fix="Install dspark again."
    )
