"""Prompts that are made, not found: our own seeded generators and those of ``reasoning-gym``.

Every choice depends on the recipe only, never on hashing or the clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from dspark.config.prompts import OrderTicketSource, ReasoningGymSource, WordProblemSource
from dspark.data.order_tickets import SYSTEM, examples, order_tickets
from dspark.data.prompt import Prompt, Split, make_prompt
from dspark.data.word_problems import word_problems
from dspark.errors import ConfigError, optional_module

# Its questions derive from a public evaluation set: training on them would spoil that benchmark.
REFUSED_TASKS = frozenset({"gsm_symbolic"})


def order_ticket_prompts(source: OrderTicketSource) -> Iterator[Prompt]:
    """Order messages to be turned into JSON (:mod:`dspark.data.order_tickets`)."""
    worked = examples()
    for split, ticket in order_tickets(source.seed, source.train, source.held_out):
        yield _prompt(split, source.category, ticket.text, "order_tickets", SYSTEM, worked)


def word_problem_prompts(source: WordProblemSource) -> Iterator[Prompt]:
    """Prompts of our own generator (:mod:`dspark.data.word_problems`)."""
    for split, text in word_problems(source.seed, source.train, source.held_out):
        yield _prompt(split, source.category, text, "word_problems")


def reasoning_gym_prompts(source: ReasoningGymSource) -> Iterator[Prompt]:
    """Questions of ``reasoning-gym`` tasks in turn, as evenly as the count allows.

    The library seeds item ``i`` with ``seed + i``, so neighbouring seeds overlap; both splits get
    seeds hashed from the recipe's seed, which lie far apart.

    Raises:
        ConfigError: a task that does not exist or must not be trained on.
        MissingDependencyError: the package is not installed.
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
                    yield _prompt(split, source.category, text, f"reasoning_gym {task}")


def _prompt(
    split: Split,
    category: str,
    text: str,
    source: str,
    system: str | None = None,
    worked: Sequence[tuple[str, str]] = (),
) -> Prompt:
    return make_prompt(split, category, [text], system, worked, language="en", source=source)


def _reasoning_gym() -> Any:
    return optional_module(
        "reasoning_gym",
        expected="the package reasoning-gym with its dependencies",
        where="prompts.sources (reasoning_gym)",
        fix="pip install reasoning-gym, or: pip install 'dspark[gym]'",
    )


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
