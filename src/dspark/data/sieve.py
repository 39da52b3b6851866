"""The filters that judge a row by itself: shape, media, roles, length, language, contamination.

They need no memory of other rows, so rows are sieved in chunks that can be done in any process,
kept and done again alike. What needs all rows (duplicates, shares) comes after, on the keys and
signatures computed here (:mod:`dspark.data.selection`).

Only training prompts are checked for contamination: held-out ones are evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dspark.config.prompts import Contamination, PromptsSection
from dspark.data.filters.evaluation import EvalItem, TaskItems, evaluation_items
from dspark.data.filters.minhash import ENTRIES, Signatures, signatures
from dspark.data.filters.ngrams import NgramIndex
from dspark.data.filters.units import Units, token_units, word_units
from dspark.data.filters.wrappers import unwrapped
from dspark.data.prompt import Prompt, Split
from dspark.data.shapes import Unusable
from dspark.data.sources import GENERATED, Candidate, Reader, unusable
from dspark.data.tokens import Tokens
from dspark.errors import DataError

ROW = np.dtype(
    [
        ("key", np.uint64, (2,)),  # 128 bits of the normalised prompt: equal means duplicate
        ("question", np.uint64),  # of the last asked turn, to find held-out questions in training
        ("source", np.uint16),
        ("held_out", np.bool_),
        ("later", np.bool_),  # has turns after the first of the user
        ("compared", np.bool_),  # takes part in the search for near duplicates
        ("length", np.uint32),  # tokens, or words without a tokenizer
        ("language", "S3"),
    ]
)
"""What is remembered of each row that passed."""
SHIPPED_HITS = 1000


class Drop(NamedTuple):
    """One dropped row."""

    source: int
    split: Split
    step: str
    example: str


@dataclass
class Sieved:
    """A chunk: rows that passed, in order, and the account of the others.

    ``beginnings`` are (row, key) of every shorter conversation that a row begins with.
    """

    lines: list[str]
    rows: npt.NDArray[Any]
    signatures: Signatures
    made: Counter[str]
    drops: list[Drop]
    hits: list[dict[str, str]]
    held_out_questions: list[int]
    beginnings: list[tuple[int, int]] = field(default_factory=list)
    scrubbed: Counter[str] = field(default_factory=Counter)


class Benchmarks:
    """The n-gram indices of all evaluation items, words always and tokens with a tokenizer."""

    def __init__(
        self, section: Contamination, tokens: Tokens | None, tasks: TaskItems | None
    ) -> None:
        self.items, self.absent = evaluation_items(section, tasks)
        texts = [item.texts for item in self.items]
        self.words = NgramIndex(word_units(texts), section.ngram, section.template_items)
        self.tokens: NgramIndex | None = None
        self._tokens = tokens
        if tokens is not None and section.token_ngram is not None:
            units = token_units([tokens.encode(row) for row in texts])
            self.tokens = NgramIndex(units, section.token_ngram, section.template_items)

    def sets(self) -> dict[str, int]:
        """Items of each set."""
        return dict(Counter(item.set for item in self.items))

    def hits(self, texts: list[list[str]], words: Units) -> dict[int, list[dict[str, str]]]:
        """Row -> its hits, ready for the report. ``words`` are those of ``texts``."""
        found: dict[int, list[dict[str, str]]] = {}
        for hit in self.words.hits(words):
            told = self._told(self.items[hit.item], "words", " ".join(hit.ngram))
            found.setdefault(hit.row, []).append(told)
        if self.tokens is not None and self._tokens is not None:
            flat = iter(self._tokens.encode([text for row in texts for text in row]))
            units = token_units([[next(flat) for _ in row] for row in texts])
            for hit in self.tokens.hits(units):
                told = self._told(self.items[hit.item], "tokens", self._tokens.decode(hit.ngram))
                found.setdefault(hit.row, []).append(told)
        return found

    @staticmethod
    def _told(item: EvalItem, level: str, ngram: str) -> dict[str, str]:
        return {"set": item.set, "item": item.id, "level": level, "ngram": ngram}


class Sieve:
    """The filters of one recipe, ready to sieve chunk after chunk."""

    def __init__(
        self,
        section: PromptsSection,
        tokens: Tokens | None,
        keep_ids: bool,
        tasks: TaskItems | None = None,
    ) -> None:
        """
        Args:
            section: the recipe's prompts.
            tokens: None leaves out lengths in tokens and token n-grams.
            keep_ids: rows of token ids are kept as they are; else they are refused.
            tasks: items of the benchmarks that ``filters.contamination.tasks`` names.
        """
        self._section = section
        self._tokens = tokens
        self._keep_ids = keep_ids
        wanted = section.filters.contamination
        self.benchmarks = None if wanted is None else Benchmarks(wanted, tokens, tasks)

    def chunk(self, candidates: Iterable[tuple[int, Candidate]]) -> Sieved:
        """Judge ``(source number, candidate)`` pairs.

        Raises:
            DataError: a row of no known shape where the recipe refuses them; a row of token ids
                where the following stages cannot take it.
        """
        result = Sieved(
            [], np.zeros(0, ROW), np.zeros((0, ENTRIES), np.uint16), Counter(), [], [], []
        )
        readers: dict[int, Reader] = {}
        passed: list[tuple[int, Prompt, int]] = []
        for number, candidate in candidates:
            result.made[f"{number} {candidate.split}"] += 1
            if number not in readers:
                readers[number] = Reader(self._section.sources[number])
            prompt = self._read(readers[number], number, candidate, result)
            if prompt is None:
                continue
            if prompt.split == "held_out" and prompt.messages:
                asked = (prompt.messages[-1]["content"], *prompt.later_turns)
                result.held_out_questions += [_key(_normal(text))[0] for text in asked]
            length = self._judge(prompt, number, result)
            if length is not None:
                passed.append((number, prompt, length))
        for reader in readers.values():
            result.scrubbed += reader.scrubbed
        self._finish(passed, result)
        return result

    def _read(
        self, reader: Reader, number: int, candidate: Candidate, result: Sieved
    ) -> Prompt | None:
        try:
            prompt = reader.prompt(candidate)
        except Unusable as error:
            if error.reason == "misshapen" and self._section.filters.misshapen == "refuse":
                fix = "Correct or remove the row, or drop such rows: prompts.filters.misshapen=drop"
                raise unusable(error, candidate.where, fix) from error
            text = f"{candidate.where}: {error.found}"
            result.drops.append(Drop(number, candidate.split, error.reason, text))
            return None
        if prompt.input_ids is not None and not self._keep_ids:
            raise DataError(
                expected="text that the target can be asked",
                found="token ids with a loss mask (input_ids, loss_mask)",
                where=candidate.where,
                fix="A run regenerates every answer and cannot take finished ones yet. Leave the "
                "source out, or keep its rows with a recipe of prompts alone.",
            )
        return prompt

    def _judge(self, prompt: Prompt, number: int, result: Sieved) -> int | None:
        """Length of a prompt that may stay, in tokens if they are counted, else 0."""
        filters = self._section.filters
        told = f"{prompt.id}: {_start(prompt)}"
        characters = sum(map(len, prompt.texts))
        if characters > filters.max_characters:
            text = f"{characters} characters > {filters.max_characters} in {told}"
            result.drops.append(Drop(number, prompt.split, "too_long", text))
            return None
        length = 0 if self._tokens is None else self._tokens.count(prompt)
        limit = self._section.max_prompt_tokens
        if length > limit and prompt.input_ids is None:
            text = f"{length} tokens > {limit} in {told}"
            result.drops.append(Drop(number, prompt.split, "too_long", text))
            return None
        wanted = filters.languages
        if wanted is not None and prompt.language not in wanted and prompt.messages:
            text = f"{prompt.language} in {told}"
            result.drops.append(Drop(number, prompt.split, "language", text))
            return None
        return length

    def _finish(self, passed: list[tuple[int, Prompt, int]], result: Sieved) -> None:
        """Contamination, then keys and signatures of what is left."""
        texts = [[unwrapped(text) for text in prompt.texts] for _, prompt, _ in passed]
        words = word_units(texts)
        found = {} if self.benchmarks is None else self.benchmarks.hits(texts, words)
        stays = []
        for row, (number, prompt, _) in enumerate(passed):
            if row in found and prompt.split == "train":
                hits = found[row]
                result.hits += [{"prompt": prompt.id, "where": prompt.source, **h} for h in hits]
                first = hits[0]
                text = f"{prompt.id}: {first['set']} {first['item']}: {first['ngram']!r}"
                result.drops.append(Drop(number, prompt.split, "contamination", text))
            else:
                stays.append(row)
        near = self._section.filters.near_duplicate
        if near is not None:
            result.signatures = signatures(words, len(passed), near.shingle)[stays]
        counts = np.bincount(words.row_of, minlength=len(passed))
        result.rows = np.zeros(len(stays), ROW)
        for place, row in enumerate(stays):
            number, prompt, length = passed[row]
            result.lines.append(prompt.model_dump_json(exclude_none=True))
            result.rows[place] = self._row(number, prompt, length, int(counts[row]))
            result.beginnings += [(place, _key(text)[0]) for text in _beginnings(prompt)]

    def _row(self, number: int, prompt: Prompt, tokens: int, words: int) -> tuple[Any, ...]:
        kind = self._section.sources[number].kind
        question = _key(_normal(prompt.messages[-1]["content"]))[0] if prompt.messages else 0
        compared = words > 0 and kind not in GENERATED
        length = words if self._tokens is None else tokens
        key = _key(_content(prompt))
        held_out = prompt.split == "held_out"
        later = bool(prompt.later_turns)
        language = prompt.language[:3].encode()
        return (key, question, number, held_out, later, compared, length, language)


def _content(prompt: Prompt) -> str:
    """Everything a prompt asks, so normalised that equal means duplicate."""
    if prompt.input_ids is not None:
        return json.dumps([prompt.input_ids, prompt.loss_mask])
    asked = [[message["role"], _normal(message["content"])] for message in prompt.messages]
    return json.dumps([asked, [_normal(text) for text in prompt.later_turns], prompt.tools])


def _beginnings(prompt: Prompt) -> list[str]:
    """:func:`_content` of the conversation as it was after each earlier turn."""
    shorter = range(len(prompt.later_turns))
    return [
        _content(prompt.model_copy(update={"later_turns": prompt.later_turns[:count]}))
        for count in shorter
    ]


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _key(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def _start(prompt: Prompt) -> str:
    text = prompt.messages[-1]["content"] if prompt.messages else "token ids"
    return repr(text[:80])
