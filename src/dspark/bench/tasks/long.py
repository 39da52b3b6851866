"""Acceptance by length of context: prompts made to measure.

Drafts that are good at 1k tokens have been useless at 32k, and short benchmarks never show it. A
prompt here is a harbour's ledger, as long as asked for, and a question whose answer stands in it.
The text is made by a seeded generator and regular on purpose, so that lengths can be met; its
acceptance is to be compared between lengths and between drafts, not with other benchmarks.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dspark.bench.tasks.questions import Question
from dspark.bench.tasks.task import Prompting, Rule, Task

LENGTHS = (1024, 4096, 16384, 32768)
PROMPTS = 5
MOST_TOKENS = 128
# Tokens of a chat template and a rounding of the estimate that must still fit.
_SPARE = 64

_SHIPS = ("Aurora", "Blue Heron", "Cormorant", "Dagmar", "Estrella", "Fairwind", "Gudrun",
          "Halcyon", "Isolde", "Juniper", "Kestrel", "Leviathan")  # fmt: skip
_GOODS = ("oranges", "roof tiles", "salted cod", "copper wire", "wool", "coffee", "paper", "glass",
          "timber", "cork", "lamp oil", "tinned peas", "bicycles", "marble")  # fmt: skip
_TOWNS = ("Lisbon", "Bergen", "Trieste", "Odessa", "Cork", "Malmo", "Genoa", "Riga", "Porto",
          "Gdansk")  # fmt: skip
_CLERKS = ("Ines Moreau", "Karl Lindqvist", "Petra Novak", "Sean Doyle", "Marta Ricci",
           "Olga Ivanova", "Tomas Berg")  # fmt: skip


def long_task(length: int) -> Task:
    """The task of one length: prompt and answer together fit into ``length`` tokens."""
    name = f"{length // 1024}k"
    return Task(
        name=f"long_{name}",
        title=f"Ledger, {name} tokens",
        version=1,
        sources=(),
        file=f"long_{name}.jsonl",
        rule=Rule(available=PROMPTS, count=PROMPTS, text=f"{PROMPTS} ledgers, seeds 0 to 4"),
        prompt=Prompting(turns="turns"),
        turns=1,
        max_tokens=MOST_TOKENS,
        context_tokens=(max(1, length // 2), length),
        licence="MIT",
        notes="Made by a generator; compare lengths and drafts, not other benchmarks.",
        how_to_get="Made by dspark itself.",
    )


def long_questions(
    length: int, count: Callable[[str], int], prompts: int = PROMPTS
) -> list[Question]:
    """Questions whose prompt has nearly ``length - MOST_TOKENS`` tokens.

    Args:
        count: tokens of a user turn, template included.
        prompts: how many; at least 5 for an interval that means something.
    """
    task = long_task(length)
    return [_question(task, length, seed, count) for seed in range(prompts)]


def _question(task: Task, length: int, seed: int, count: Callable[[str], int]) -> Question:
    room = length - MOST_TOKENS - _SPARE
    rng = random.Random(f"dspark ledger/{length}/{seed}")
    # Entries are alike in length, so a sample tells how many fit; then it is corrected.
    entries = [_entry(rng, number) for number in range(1, 40)]
    each = (count(_prompt(entries, "Aurora")) - count(_prompt([], "Aurora"))) / len(entries)
    while len(entries) < room / each:
        entries.append(_entry(rng, len(entries) + 1))
    entries = entries[: max(1, int(room / each))]
    ship = _SHIPS[seed % len(_SHIPS)]
    while len(entries) > 1 and count(_prompt(entries, ship)) > room:
        del entries[-max(1, len(entries) // 50) :]
    return Question(task.name, f"{task.name}/{seed}", task.name, (_prompt(entries, ship),))


def _entry(rng: random.Random, number: int) -> str:
    def pick(values: tuple[str, ...]) -> str:
        return values[int(rng.random() * len(values))]

    return (
        f"{number}. On day {1 + int(rng.random() * 365)} the {pick(_SHIPS)} from {pick(_TOWNS)} "
        f"landed {2 + int(rng.random() * 90)} crates of {pick(_GOODS)}; "
        f"clerk: {pick(_CLERKS)}."
    )


def _prompt(entries: list[str], ship: str) -> str:
    return (
        "This is the ledger of a harbour.\n\n"
        + "\n".join(entries)
        + f"\n\nRepeat, word for word, every line of the ledger about the ship {ship}, and nothing "
        "else."
    )


def counter_from_probe(text: str, tokens: int) -> Callable[[str], int]:
    """An estimate of tokens from one measured text, for servers that count only when asked."""
    each = tokens / max(1, len(text))
    return lambda other: int(len(other) * each) + 1


def probe_text() -> str:
    """A ledger whose tokens a server is asked to count."""
    rng = random.Random("dspark ledger/probe")
    return _prompt([_entry(rng, number) for number in range(1, 40)], "Aurora")
