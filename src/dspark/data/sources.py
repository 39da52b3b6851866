"""Where prompts come from: a stream of candidates for each kind of source a recipe can name.

A candidate is a row as it was found, with its place and split; what shape it has and whether it is
kept is decided later (:mod:`dspark.data.sieve`). Generators and packages give finished prompts.
Every choice a source makes (which rows, for which split) depends on the recipe and the file only.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from dspark.config.prompts import (
    Count,
    FileSource,
    HubSource,
    OrderTicketSource,
    PackageSource,
    PromptSource,
    ReasoningGymSource,
    TrafficSource,
    WordProblemSource,
)
from dspark.data.filters.language import language_of
from dspark.data.generated import (
    order_ticket_prompts,
    reasoning_gym_prompts,
    word_problem_prompts,
)
from dspark.data.hub import read_hub
from dspark.data.packages import PACKAGES, package_file, package_rows
from dspark.data.prompt import Prompt, Split, first_problem, make_prompt, tokenised_prompt
from dspark.data.records import read_records
from dspark.data.scrub import Scrubber, scrubber
from dspark.data.shapes import Unusable, recognise
from dspark.data.traffic import request_body, scrubbed
from dspark.errors import DataError

T = TypeVar("T")
CODE_REQUEST = "Complete this Python function and reply with the whole function."
GENERATED = frozenset({"order_tickets", "word_problems", "reasoning_gym", "human_eval", "mt_bench"})
"""Kinds that give finished prompts."""


class Candidate(NamedTuple):
    """A row that may become a prompt: where it was found, its split, and what was found."""

    where: str
    split: Split
    row: dict[str, Any] | Prompt


def candidates_of(source: PromptSource) -> Iterator[Candidate]:
    """All candidates of one source, always in the same order.

    Raises:
        ConfigError: the source asks for something that must not or cannot be generated.
        DataError: its file is unreadable or holds fewer rows than asked for.
        MissingDependencyError: the package that holds its prompts is not installed.
    """
    if isinstance(source, (FileSource, TrafficSource)):
        yield from _file_rows(source)
    elif isinstance(source, HubSource):
        yield from _hub_rows(source)
    else:
        for prompt in _made(source):
            yield Candidate(prompt.source, prompt.split, prompt)


def prompts_of(source: PromptSource) -> Iterator[Prompt]:
    """All prompts of one source, every row of which must be sound.

    Raises:
        DataError: a row is of no known shape or asks nothing; names its line. Else as
            :func:`candidates_of`.
    """
    turn = Reader(source)
    for candidate in candidates_of(source):
        try:
            yield turn.prompt(candidate)
        except Unusable as error:
            raise unusable(error, candidate.where) from error


def file_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file to measure on, as held-out ones, in its order; at least one.

    Raises:
        DataError: unreadable, empty, or a row that is no prompt.
    """
    count = _count(path)
    if not count:
        raise DataError(
            expected="at least one prompt",
            found="an empty file",
            where=str(path),
            fix='Write one JSON object a line: {"prompt": "..."} or {"messages": [...]}.',
        )
    source = FileSource(kind="file", path=str(path), category="file", held_out=count)
    return list(prompts_of(source))


def usable_prompts(source: PromptSource) -> Iterator[Prompt]:
    """The prompts of one source without the rows that ask nothing; raises as
    :func:`candidates_of`.
    """
    turn = Reader(source)
    for candidate in candidates_of(source):
        with contextlib.suppress(Unusable):
            yield turn.prompt(candidate)


def unusable(error: Unusable, where: str, fix: str = "Correct or remove the line.") -> DataError:
    """The complaint about one row, with its place."""
    return DataError(expected=error.expected, found=error.found, where=where, fix=fix)


class Reader:
    """Turns candidates of one source into prompts; counts what was scrubbed from them."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._scrub: Scrubber | None = None
        if isinstance(source, TrafficSource):
            self._scrub = scrubber(source.scrub)
        self.scrubbed: Counter[str] = Counter()

    def prompt(self, candidate: Candidate) -> Prompt:
        """The prompt a candidate asks.

        Raises:
            Unusable: the reason why it asks none.
        """
        where, split, row = candidate
        if isinstance(row, Prompt):
            return row
        source = self._source
        talk = recognise(request_body(row) if self._scrub else row)
        if self._scrub is not None:
            talk = scrubbed(talk, self._scrub, self.scrubbed)
        try:
            if talk.ids is not None and talk.mask is not None:
                return tokenised_prompt(split, source.category, talk.ids, talk.mask, where)
            declared = talk.language
            if isinstance(source, (FileSource, TrafficSource, HubSource)):
                declared = declared or source.language
            return make_prompt(
                split,
                source.category,
                talk.turns,
                talk.system,
                tools=talk.tools,
                language=language_of(talk.turns, declared),
                source=where,
            )
        except ValidationError as error:
            expected = "a prompt that asks something"
            raise Unusable("misshapen", expected, first_problem(error)) from error


def _made(source: PromptSource) -> Iterator[Prompt]:
    if isinstance(source, OrderTicketSource):
        return order_ticket_prompts(source)
    if isinstance(source, WordProblemSource):
        return word_problem_prompts(source)
    if isinstance(source, ReasoningGymSource):
        return reasoning_gym_prompts(source)
    if isinstance(source, PackageSource):
        return package_prompts(source)
    raise TypeError(f"{source.kind} gives rows, not prompts")


def package_prompts(source: PackageSource) -> Iterator[Prompt]:
    """Held-out prompts of an evaluation package, evenly spread over its questions."""
    rows = list(package_rows(source.kind))
    for where, _, turns in _spread(rows, source.held_out, source.kind):
        if source.kind == "human_eval":
            turns = [f"{CODE_REQUEST}\n\n```python\n{turns[0]}\n```"]
        yield make_prompt("held_out", source.category, turns, language="en", source=where)


def _file_rows(source: FileSource | TrafficSource) -> Iterator[Candidate]:
    """Rows of local files in their order.

    With counts, a seeded choice: held-out rows are chosen first, then training rows, so a larger
    ``train`` never moves a row out of the held-out split. That takes one more pass over the files.
    """
    path = Path(source.path)
    if source.train == "all" and not source.held_out:
        for where, row in read_records(path):
            yield Candidate(where, "train", row)
        return
    chosen = _choice(source.train, source.held_out, source.seed, _count(path), str(path))
    for number, (where, row) in enumerate(read_records(path)):
        if number in chosen:
            yield Candidate(where, chosen[number], row)


def _count(path: Path) -> int:
    return sum(1 for _ in read_records(path))


def _choice(train: Count, held_out: int, seed: int, available: int, where: str) -> dict[int, Split]:
    least = held_out if train == "all" else held_out + train
    _require(least, available, where)
    rows = _shuffled(list(range(available)), f"dspark file rows/{seed}")
    wanted = available if train == "all" else least
    return {row: "held_out" if n < held_out else "train" for n, row in enumerate(rows[:wanted])}


def _hub_rows(source: HubSource) -> Iterator[Candidate]:
    count = None if source.train == "all" else source.held_out + source.train
    found = 0
    for found, (where, row) in enumerate(read_hub(source, count), start=1):
        yield Candidate(where, "held_out" if found <= source.held_out else "train", row)
    _require(source.held_out if count is None else count, found, f"hub data set {source.dataset}")


def _require(wanted: int, available: int, where: str) -> None:
    if wanted > available:
        raise DataError(
            expected=f"at least {wanted} rows (train + held_out)",
            found=f"{available}",
            where=where,
            fix="Ask for fewer prompts in the recipe, or add rows.",
        )


def _spread(rows: list[T], count: int, where: str) -> list[T]:
    """``count`` rows at even distances: benchmark files are sorted by subject."""
    _require(count, len(rows), where)
    return [rows[index * len(rows) // count] for index in range(count)]


def _shuffled(rows: list[T], key: str) -> list[T]:
    """A seeded permutation by :meth:`random.Random.random` alone, stable in all Python versions."""
    chance = random.Random(key).random
    return [row for _, row in sorted(((chance(), row) for row in rows), key=lambda pair: pair[0])]


__all__ = [
    "GENERATED",
    "PACKAGES",
    "Candidate",
    "Reader",
    "candidates_of",
    "package_file",
    "prompts_of",
    "usable_prompts",
]
