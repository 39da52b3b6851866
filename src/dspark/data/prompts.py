"""From a recipe's sources to a clean prompt set, with an account of everything left out.

Three passes, none of which holds the texts of more than one chunk:

1. rows are read, recognised and judged one by one, in chunks that are kept on disk
   (:mod:`dspark.data.sieve`, :mod:`dspark.data.chunks`);
2. keys and signatures of what passed decide about duplicates and shares
   (:mod:`dspark.data.selection`);
3. what is left is copied into shards (:mod:`dspark.data.shards`), and the report is written.

A chunk is a function of the recipe and its files alone, so a stage that was killed anywhere goes on
with the next chunk and ends with the very same files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.artifacts import atomic_json
from dspark.artifacts.progress import OnDone, untold
from dspark.config.prompts import PackageSource, PromptSource, PromptsSection, SelfInstructSource
from dspark.data.chunks import CHUNK_ROWS, Account, Chunks
from dspark.data.filters.evaluation import TaskItems
from dspark.data.prompt import Split
from dspark.data.prompt_page import write_page
from dspark.data.prompt_report import (
    SPLITS,
    Cluster,
    DuplicateReport,
    PromptReport,
    build_report,
    drop_summary,
)
from dspark.data.selection import STEPS, Selection, select
from dspark.data.self_instruct import file_name, written_prompts
from dspark.data.shards import ShardWriter
from dspark.data.sieve import Sieve
from dspark.data.sources import Candidate, candidates_of
from dspark.data.tokens import Tokens
from dspark.errors import DataError

REPORT = "report.json"
HITS = "contamination.json"
# What to do when no prompt of a category is left; a verb without a recipe says something else.
NOTHING_LEFT = (
    "Raise prompts.max_prompt_tokens, change prompts.filters, or take prompts from another source."
)
_LARGEST = 20
_SHOWN = 3


def build_prompts(
    section: PromptsSection,
    folder: Path,
    tokens: Tokens | None,
    *,
    keep_ids: bool = False,
    tasks: TaskItems | None = None,
    on_rows: OnDone = untold,
) -> PromptReport:
    """Write shards, ``report.json``, ``report.html`` and ``contamination.json`` into ``folder``.

    Args:
        section: the recipe's ``prompts``.
        folder: exists; finished chunks of an earlier attempt in it are used. What the target wrote
            for sources of kind self_instruct is there already.
        tokens: the target's tokenizer; None leaves out what needs one, and the report says so.
        tasks: items of the benchmarks that ``filters.contamination.tasks`` names.
        keep_ids: keep rows of token ids instead of refusing them.
        on_rows: called with the number of rows read since the last call.

    Raises:
        DataError: a row that is refused, nothing asked for, or a category that kept nothing of a
            split it asked for.
        ConfigError, MissingDependencyError: see :func:`dspark.data.sources.candidates_of`.
    """
    _refuse_nothing(section.sources)
    chunks = Chunks(folder)
    sieve = Sieve(section, tokens, keep_ids, tasks)
    count = _sieve_all(section, sieve, chunks, folder, on_rows)
    account = chunks.account(count)
    rows = chunks.rows(count)
    near = section.filters.near_duplicate is not None
    signatures = chunks.signatures(count, len(rows) if near else 0)
    beginnings = chunks.beginnings(count)
    selection = select(rows, signatures, beginnings, account.held_out_questions, section)
    told = _write_shards(folder, chunks.lines(count), rows, selection)
    _count_selection(account, rows, selection, told)
    _refuse_empty(section.sources, account, rows[selection.step == 0])
    report = build_report(
        section.sources,
        account,
        rows[selection.step == 0],
        _clusters(selection, told),
        sieve.benchmarks,
        counted_tokens=tokens is not None,
    )
    atomic_json(folder / HITS, account.hits)
    atomic_json(folder / REPORT, report.model_dump(mode="json"))
    write_page(folder, report)
    del signatures
    chunks.remove()
    return report


def _sieve_all(
    section: PromptsSection,
    sieve: Sieve,
    chunks: Chunks,
    folder: Path,
    on_rows: OnDone,
) -> int:
    """Sieve what is not sieved yet; the number of chunks."""
    candidates = _numbered(section.sources, folder)
    number = 0
    while batch := list(islice(candidates, CHUNK_ROWS)):
        kept = chunks.done(number)
        if not kept:
            chunks.put(number, sieve.chunk(batch))
        on_rows(len(batch), kept=kept)
        number += 1
    return number


def _numbered(sources: Sequence[PromptSource], folder: Path) -> Iterator[tuple[int, Candidate]]:
    for number, source in enumerate(sources):
        if isinstance(source, SelfInstructSource):
            for prompt in written_prompts(source, folder / file_name(number)):
                yield number, Candidate(prompt.source, prompt.split, prompt)
            continue
        for candidate in candidates_of(source):
            yield number, candidate


def _write_shards(
    folder: Path, lines: Iterator[str], rows: npt.NDArray[Any], selection: Selection
) -> dict[int, str]:
    """Copy what is kept into shards; texts of the rows that the report tells about."""
    wanted = _told_about(selection)
    told: dict[int, str] = {}
    writer = ShardWriter(folder)
    for number, line in enumerate(lines):
        if selection.step[number] == 0:
            writer.add("held_out" if rows["held_out"][number] else "train", line)
        if number in wanted:
            row = json.loads(line)
            text = row["messages"][-1]["content"] if row["messages"] else "token ids"
            told[number] = f"{row['id']}: {text[:160]!r}"
    writer.close()
    return told


def _told_about(selection: Selection) -> set[int]:
    wanted = {int(dropped[0]) for step in STEPS[1:] if len(dropped := selection.dropped(step))}
    for _, kept, lost in _largest(selection):
        wanted |= {kept, *lost[:_SHOWN]}
    return wanted


def _largest(selection: Selection) -> list[tuple[str, int, list[int]]]:
    """(kind, kept row, dropped rows) of the largest clusters of each kind."""
    found = []
    for kind in ("duplicate", "near_duplicate"):
        lost = selection.dropped(kind)
        kept, sizes = np.unique(selection.kept_for[lost], return_counts=True)
        for place in np.argsort(-sizes, kind="stable")[:_LARGEST]:
            row = int(kept[place])
            found.append((kind, row, lost[selection.kept_for[lost] == row].tolist()))
    return found


def _clusters(selection: Selection, told: dict[int, str]) -> DuplicateReport:
    counts: dict[str, int] = {}
    sizes: Counter[str] = Counter()
    for kind in ("duplicate", "near_duplicate"):
        _, members = np.unique(selection.kept_for[selection.dropped(kind)], return_counts=True)
        counts[kind] = len(members)
        for least in (2, 3, 5, 10, 100, 1000):
            sizes[f"{least}+"] += int((members + 1 >= least).sum())
    largest = tuple(
        Cluster(
            kind=kind,
            rows=len(lost) + 1,
            kept=told[kept],
            dropped=tuple(told[row] for row in lost[:_SHOWN]),
        )
        for kind, kept, lost in _largest(selection)
    )
    return DuplicateReport(clusters=counts, sizes=dict(sizes), largest=largest)


def _count_selection(
    account: Account, rows: npt.NDArray[Any], selection: Selection, told: dict[int, str]
) -> None:
    for number, step in enumerate(STEPS[1:], start=1):
        lost = np.flatnonzero(selection.step == number)
        if not len(lost):
            continue
        example = told[int(lost[0])]
        for source in np.unique(rows["source"][lost]).tolist():
            own = lost[rows["source"][lost] == source]
            held = int(rows["held_out"][own].sum())
            for split, count in (("train", len(own) - held), ("held_out", held)):
                if count:
                    account.drop((source, split, step), count, example)


def _asked(source: PromptSource, split: Split) -> int:
    if split == "held_out":
        return source.held_out
    if isinstance(source, PackageSource):
        return 0
    return 1 if source.train == "all" else source.train


def _refuse_nothing(sources: Sequence[PromptSource]) -> None:
    if not any(_asked(source, split) for source in sources for split in SPLITS):
        raise DataError(
            expected="at least one prompt",
            found="train and held_out are 0 in every source",
            where="prompts.sources",
            fix="Set train or held_out of a source.",
        )


def _refuse_empty(
    sources: Sequence[PromptSource], account: Account, kept: npt.NDArray[Any]
) -> None:
    """Each category must keep something of every split it asked for."""
    for category in dict.fromkeys(source.category for source in sources):
        own = {n for n, source in enumerate(sources) if source.category == category}
        for split in SPLITS:
            wanted = sum(_asked(sources[number], split) for number in own)
            mine = np.isin(kept["source"], list(own)) & (kept["held_out"] == (split == "held_out"))
            if not wanted or mine.any():
                continue
            dropped = {w: n for w, n in account.drops.items() if w[0] in own and w[1] == split}
            example = account.examples[next(iter(dropped))] if dropped else "nothing was read"
            raise DataError(
                expected=f"some of the {split} prompts to be usable",
                found=f"none: {drop_summary(dropped, own, split)} (first: {example})",
                where=f"prompts, category {category}",
                fix=NOTHING_LEFT,
            )
