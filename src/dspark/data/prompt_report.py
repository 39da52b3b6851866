"""The account of a prompt set: what came in, what each filter dropped and why, what is left.

``report.json`` is this schema; ``report.html`` shows it. rows_in = rows_out + all that was dropped,
in every source and split, and each step has an example of what it dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt

from dspark.config.architecture import Frozen
from dspark.config.prompts import PromptSource, TrafficSource
from dspark.data.chunks import Account
from dspark.data.prompt import Split
from dspark.data.sieve import Benchmarks

SPLITS: tuple[Split, Split] = ("train", "held_out")
FUNNEL = (
    "misshapen", "image", "empty", "roles", "too_long", "language", "contamination",
    "in_held_out", "duplicate", "near_duplicate", "quota",
)  # fmt: skip
"""Every step, in the order rows meet them."""
EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lower ends of the length histogram's bins; the last one is open."""
SHIPPED_HITS = 1000


class FunnelStep(Frozen):
    """One filter: rows it met, rows it dropped, and one of them."""

    step: str
    rows_in: NonNegativeInt
    rows_out: NonNegativeInt
    dropped: NonNegativeInt
    example: str | None


class SourceReport(Frozen):
    """What one source gave (``made``) and what was left of it (``kept``), by split."""

    source: str
    category: str
    made: dict[Split, int]
    kept: dict[Split, int]
    dropped: dict[str, int]


class CategoryReport(Frozen):
    """One category: rows in and out, drops by step, and the length of what is kept.

    ``length`` counts tokens or words (the report's ``length_unit``); ``histogram`` counts kept rows
    by :data:`EDGES`.
    """

    category: str
    rows_in: NonNegativeInt
    rows_out: NonNegativeInt
    dropped: dict[str, int]
    length: NonNegativeInt
    histogram: tuple[NonNegativeInt, ...]


class Cluster(Frozen):
    """Rows that are (nearly) the same: the one kept, how many, and some of the dropped ones."""

    kind: str
    rows: NonNegativeInt
    kept: str
    dropped: tuple[str, ...]


class DuplicateReport(Frozen):
    """Clusters of duplicates by kind, how many of each size, and the largest."""

    clusters: dict[str, int]
    sizes: dict[str, int]
    largest: tuple[Cluster, ...]


class HitReport(Frozen):
    """A training prompt that holds an n-gram of an evaluation item."""

    prompt: str
    where: str
    set: str
    item: str
    level: str
    ngram: str


class ContaminationReport(Frozen):
    """What prompts were compared with, how, and the first hits (all are in contamination.json).

    ``template_ngrams`` were left out because more items share them than the recipe allows;
    ``not_installed`` benchmarks were not compared.
    """

    checked: bool
    ngram: int | None
    token_ngram: int | None
    sets: dict[str, int]
    not_installed: tuple[str, ...]
    template_ngrams: NonNegativeInt
    hits: NonNegativeInt
    first_hits: tuple[HitReport, ...]


class PromptReport(Frozen):
    """``report.json`` of a prompts folder. ``later_turns``: kept rows with more than one turn."""

    rows_in: NonNegativeInt
    rows_out: NonNegativeInt
    splits: dict[Split, int]
    later_turns: dict[Split, int]
    funnel: tuple[FunnelStep, ...]
    length_unit: str
    length_edges: tuple[int, ...]
    categories: tuple[CategoryReport, ...]
    sources: tuple[SourceReport, ...]
    languages: dict[str, int]
    duplicates: DuplicateReport
    contamination: ContaminationReport
    stored: str
    scrubbed: dict[str, int]
    notes: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """For the manifest: rows of each split, and rows that came in."""
        held_out = self.splits["held_out"]
        return {"train": self.splits["train"], "held_out": held_out, "rows_in": self.rows_in}

    def dropped(self, step: str) -> int:
        """Rows that ``step`` dropped."""
        return sum(s.dropped for s in self.funnel if s.step == step)


def build_report(
    sources: Sequence[PromptSource],
    account: Account,
    kept: npt.NDArray[Any],
    duplicates: DuplicateReport,
    benchmarks: Benchmarks | None,
    *,
    counted_tokens: bool,
) -> PromptReport:
    """Put the figures together.

    Args:
        sources: of the recipe, as numbered in ``account``.
        account: what was made and dropped, by every step.
        kept: [n] of :data:`dspark.data.sieve.ROW`, the rows that are in the shards.
        duplicates: their clusters.
        benchmarks: what training prompts were compared with, if they were.
        counted_tokens: lengths are tokens, else words.
    """
    parts = tuple(_source(number, source, account, kept) for number, source in enumerate(sources))
    names = list(dict.fromkeys(source.category for source in sources))
    languages = Counter(value.decode() for value in kept["language"].tolist())
    return PromptReport(
        rows_in=account.made.total(),
        rows_out=len(kept),
        splits={split: sum(part.kept[split] for part in parts) for split in SPLITS},
        later_turns={
            "train": int((kept["later"] & ~kept["held_out"]).sum()),
            "held_out": int((kept["later"] & kept["held_out"]).sum()),
        },
        funnel=_funnel(account),
        length_unit="tokens" if counted_tokens else "words",
        length_edges=EDGES,
        categories=tuple(_category(name, sources, parts, kept) for name in names),
        sources=parts,
        languages=dict(languages.most_common()),
        duplicates=duplicates,
        contamination=_contamination(benchmarks, account),
        stored=_stored(sources),
        scrubbed=dict(sorted((k, n) for k, n in account.scrubbed.items() if n)),
        notes=_notes(benchmarks, counted_tokens),
    )


def _funnel(account: Account) -> tuple[FunnelStep, ...]:
    left = account.made.total()
    steps = []
    for step in FUNNEL:
        dropped = sum(n for (_, _, name), n in account.drops.items() if name == step)
        example = next((t for (_, _, name), t in account.examples.items() if name == step), None)
        steps.append(
            FunnelStep(
                step=step, rows_in=left, rows_out=left - dropped, dropped=dropped, example=example
            )
        )
        left -= dropped
    return tuple(steps)


def _source(
    number: int, source: PromptSource, account: Account, kept: npt.NDArray[Any]
) -> SourceReport:
    held = kept["held_out"][kept["source"] == number]
    dropped: Counter[str] = Counter()
    for (owner, _, step), count in account.drops.items():
        if owner == number:
            dropped[step] += count
    return SourceReport(
        source=f"sources.{number} ({source_name(source)})",
        category=source.category,
        made={split: account.made[f"{number} {split}"] for split in SPLITS},
        kept={"train": int((~held).sum()), "held_out": int(held.sum())},
        dropped=dict(dropped),
    )


def source_name(source: PromptSource) -> str:
    """Kind of a source, and its file or data set."""
    for key in ("path", "dataset"):
        if key in type(source).model_fields:
            return f"{source.kind} {source.model_dump()[key]}"
    return source.kind


def _category(
    name: str,
    sources: Sequence[PromptSource],
    parts: Sequence[SourceReport],
    kept: npt.NDArray[Any],
) -> CategoryReport:
    own = [number for number, source in enumerate(sources) if source.category == name]
    lengths = kept["length"][np.isin(kept["source"], own)]
    bins = np.searchsorted(EDGES, lengths, side="right") - 1
    dropped: Counter[str] = Counter()
    for number in own:
        dropped.update(parts[number].dropped)
    return CategoryReport(
        category=name,
        rows_in=sum(sum(parts[number].made.values()) for number in own),
        rows_out=len(lengths),
        dropped=dict(dropped),
        length=int(lengths.sum(dtype=np.int64)),
        histogram=tuple(np.bincount(bins.clip(0), minlength=len(EDGES)).tolist()),
    )


def _contamination(benchmarks: Benchmarks | None, account: Account) -> ContaminationReport:
    if benchmarks is None:
        nothing: dict[str, Any] = {"sets": {}, "not_installed": (), "first_hits": ()}
        return ContaminationReport(
            checked=False, ngram=None, token_ngram=None, template_ngrams=0, hits=0, **nothing
        )
    by_tokens = benchmarks.tokens
    return ContaminationReport(
        checked=True,
        ngram=benchmarks.words.ngram,
        token_ngram=None if by_tokens is None else by_tokens.ngram,
        sets=benchmarks.sets(),
        not_installed=tuple(benchmarks.absent),
        template_ngrams=benchmarks.words.ignored + (by_tokens.ignored if by_tokens else 0),
        hits=len(account.hits),
        first_hits=tuple(HitReport(**hit) for hit in account.hits[:SHIPPED_HITS]),
    )


def _stored(sources: Sequence[PromptSource]) -> str:
    text = (
        "Of each row: system turn, user turns, tools, category, language, and the place it was "
        "found. Answers in the sources, and every other field of a row, are not stored."
    )
    for number, source in enumerate(sources):
        if isinstance(source, TrafficSource):
            how = {
                "default": "after e-mail addresses, telephone numbers, IP addresses, card numbers "
                "and keys were replaced; names and street addresses are not recognised",
                "none": "as they were logged, WITHOUT any scrubbing",
            }.get(source.scrub, f"as {source.scrub} returned them")
            text += f" Requests of sources.{number} ({source.path}) are stored {how}."
    return text


def _notes(benchmarks: Benchmarks | None, counted_tokens: bool) -> tuple[str, ...]:
    notes = []
    if not counted_tokens:
        notes.append(
            "No tokenizer was given: lengths are words, max_prompt_tokens was not applied, and "
            "n-grams were compared by words only."
        )
    if benchmarks is None:
        notes.append("Training prompts were not compared with any evaluation item.")
    else:
        if benchmarks.absent:
            absent = ", ".join(benchmarks.absent)
            notes.append(f"Not at hand, so not compared with: {absent}.")
        if not benchmarks.items:
            notes.append("There was no evaluation item to compare training prompts with.")
    return tuple(notes)


def drop_summary(report: Mapping[tuple[int, str, str], int], owner: set[int], split: str) -> str:
    """``3 too_long, 1 duplicate`` for the sources in ``owner``."""
    counts: Counter[str] = Counter()
    for (source, where, step), count in report.items():
        if source in owner and where == split:
            counts[step] += count
    return ", ".join(f"{count} {step}" for step, count in counts.most_common()) or "none was made"
