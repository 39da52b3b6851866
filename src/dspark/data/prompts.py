"""From a recipe's sources to one clean list of prompts, with an account of everything left out.

Three rules, in this order, held-out prompts first: an exact duplicate is dropped; a training
prompt whose question is also a held-out question is dropped (whatever became of the held-out
one), because a draft measured on text it was trained on looks better than it is; a prompt
longer than ``max_prompt_tokens`` is dropped. Texts are compared without case and with white space
normalised. Nothing is dropped silently: the report counts by source, split and reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dspark.artifacts import atomic_write
from dspark.config.architecture import Frozen
from dspark.config.recipe import PackageSource, PromptSource, PromptsSection
from dspark.data.jsonl import read_json_lines
from dspark.data.prompt import Prompt, Split, first_problem
from dspark.data.sources import prompts_of
from dspark.errors import DataError

Reason = Literal["duplicate", "in_held_out", "too_long"]
CountTokens = Callable[[list[dict[str, str]]], int]
SPLITS: tuple[Split, Split] = ("train", "held_out")


class Drop(Frozen):
    """How many prompts of one split were dropped for one reason, and the first of them."""

    split: Split
    reason: Reason
    count: int
    example: str


class SourceReport(Frozen):
    """What one source gave (``made``) and what was left of it (``kept``), by split."""

    source: str
    category: str
    made: dict[Split, int]
    kept: dict[Split, int]
    drops: tuple[Drop, ...]


class PromptReport(Frozen):
    """The account of a whole prompt set; made = kept + dropped in every source and split."""

    sources: tuple[SourceReport, ...]

    def kept(self, split: Split) -> int:
        """Prompts kept in ``split`` over all sources."""
        return sum(source.kept[split] for source in self.sources)

    def dropped(self, split: Split) -> int:
        """Prompts dropped from ``split`` over all sources, for any reason."""
        return sum(d.count for source in self.sources for d in source.drops if d.split == split)


class _Sieve:
    """The three rules, with the memory they need. Feed it held-out prompts before training ones."""

    def __init__(self, count_tokens: CountTokens, max_tokens: int) -> None:
        self._count_tokens = count_tokens
        self._max_tokens = max_tokens
        self._seen: set[tuple[str, ...]] = set()
        self._held_out_questions: set[str] = set()

    def reason(self, prompt: Prompt) -> tuple[Reason, str] | None:
        """Why ``prompt`` is dropped, with an example text; ``None`` keeps it."""
        key = tuple(_normal(message["content"]) for message in prompt.messages)
        question = key[-1]
        text = f"{prompt.id}: {prompt.messages[-1]['content'][:80]!r}"
        if prompt.split == "train" and question in self._held_out_questions:
            return "in_held_out", text
        if prompt.split == "held_out":
            self._held_out_questions.update((question, *map(_normal, prompt.later_turns)))
        if key in self._seen:
            return "duplicate", text
        self._seen.add(key)
        tokens = self._count_tokens(prompt.messages)
        if tokens > self._max_tokens:
            return "too_long", f"{tokens} tokens > {self._max_tokens} in {text}"
        return None


def build_prompts(
    section: PromptsSection, count_tokens: CountTokens
) -> tuple[list[Prompt], PromptReport]:
    """Read every source and apply the three rules.

    Args:
        section: the recipe's ``prompts``.
        count_tokens: length in tokens of messages under the target's chat template.

    Returns:
        Training prompts in source order, then held-out prompts in source order; and the report.

    Raises:
        DataError: nothing was asked for, or a split that a category asked for ended up empty.
        ConfigError, MissingDependencyError: see :func:`dspark.data.sources.prompts_of`.
    """
    made = [list(prompts_of(source)) for source in section.sources]
    sieve = _Sieve(count_tokens, section.max_prompt_tokens)
    kept: dict[Split, list[list[Prompt]]] = {split: [[] for _ in made] for split in SPLITS}
    drops: list[list[tuple[Split, Reason, str]]] = [[] for _ in made]
    for split in reversed(SPLITS):
        for number, prompts in enumerate(made):
            for prompt in prompts:
                if prompt.split != split:
                    continue
                verdict = sieve.reason(prompt)
                if verdict is None:
                    kept[split][number].append(prompt)
                else:
                    drops[number].append((split, *verdict))
    reports = tuple(
        SourceReport(
            source=f"sources.{number} ({source.kind})",
            category=source.category,
            made={split: sum(p.split == split for p in made[number]) for split in SPLITS},
            kept={split: len(kept[split][number]) for split in SPLITS},
            drops=_tally(drops[number]),
        )
        for number, source in enumerate(section.sources)
    )
    report = PromptReport(sources=reports)
    _refuse_empty(section.sources, report)
    return [p for split in SPLITS for part in kept[split] for p in part], report


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _tally(drops: Sequence[tuple[Split, Reason, str]]) -> tuple[Drop, ...]:
    counts = Counter((split, reason) for split, reason, _ in drops)
    examples = {(split, reason): text for split, reason, text in reversed(drops)}
    return tuple(
        Drop(split=split, reason=reason, count=n, example=examples[split, reason])
        for (split, reason), n in counts.items()
    )


def _asked(source: PromptSource, split: Split) -> int:
    if split == "held_out":
        return source.held_out
    return 0 if isinstance(source, PackageSource) else source.train


def _refuse_empty(sources: Sequence[PromptSource], report: PromptReport) -> None:
    """Each category must keep something of every split it asked for."""
    asked: Counter[tuple[str, Split]] = Counter()
    kept: Counter[tuple[str, Split]] = Counter()
    for source, part in zip(sources, report.sources, strict=True):
        for split in SPLITS:
            asked[source.category, split] += _asked(source, split)
            kept[source.category, split] += part.kept[split]
    if not asked.total():
        raise DataError(
            expected="at least one prompt",
            found="train and held_out are 0 in every source",
            where="prompts.sources",
            fix="Set train or held_out of a source.",
        )
    for (category, split), wanted in asked.items():
        if wanted and not kept[category, split]:
            drops = [
                f"{d.count} {d.reason} (first: {d.example})"
                for part in report.sources
                for d in part.drops
                if part.category == category and d.split == split
            ]
            raise DataError(
                expected=f"some of {wanted} {split} prompts to be usable",
                found=f"none: {'; '.join(drops)}",
                where=f"prompts, category {category}",
                fix="Raise prompts.max_prompt_tokens, or take prompts from another source.",
            )


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write one JSON object a line; the file appears complete or not at all.

    Raises:
        DataError: there is no prompt to write.
        StorageError: the place is not writable or the disk is full.
    """
    lines = [prompt.model_dump_json() + "\n" for prompt in prompts]
    if not lines:
        raise DataError(
            expected="at least one prompt",
            found="none",
            where=str(path),
            fix="Set train or held_out of a source in the recipe.",
        )
    atomic_write(path, "".join(lines))


def read_prompts(path: Path) -> list[Prompt]:
    """Read what :func:`write_prompts` wrote.

    Raises:
        DataError: the file is unreadable or empty, or a line is no prompt or repeats an id.
    """
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        try:
            prompt = Prompt.model_validate(row)
        except ValidationError as error:
            raise DataError(
                expected="a prompt (id, split, category, messages, later_turns)",
                found=first_problem(error),
                where=where,
                fix="Run the prompts stage again; this file is its output, not its input.",
            ) from error
        if prompt.id in lines:
            raise DataError(
                expected="ids that name one prompt each",
                found=f"{prompt.id}, already on line {lines[prompt.id]}",
                where=where,
                fix="Run the prompts stage again.",
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    return prompts


__all__ = [
    "CountTokens",
    "Drop",
    "Prompt",
    "PromptReport",
    "SourceReport",
    "Split",
    "build_prompts",
    "read_prompts",
    "write_prompts",
]
