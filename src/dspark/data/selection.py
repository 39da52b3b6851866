"""The rules that need all rows: held-out questions, duplicates, near duplicates, shares.

Held-out rows come first: of two equal prompts the held-out one stays, and a training prompt whose
question is a held-out question goes (whatever became of the held-out one), because a draft measured
on text it was trained on looks better than it is. Among equals the first found stays.

Everything works on 128-bit keys and signatures, never on texts, so a million rows need some 100 MB.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.config.prompts import PromptsSection, Share
from dspark.data.filters.minhash import Signatures, clusters
from dspark.data.filters.units import Indices

STEPS = ("keep", "in_held_out", "duplicate", "near_duplicate", "quota")


@dataclass
class Selection:
    """``step`` [rows] indexes :data:`STEPS`; ``kept_for`` [rows] is the row a duplicate lost to."""

    step: npt.NDArray[np.uint8]
    kept_for: Indices

    def dropped(self, step: str) -> Indices:
        """Rows that ``step`` dropped."""
        return np.flatnonzero(self.step == STEPS.index(step))


def select(
    rows: npt.NDArray[Any],
    signatures: Signatures,
    beginnings: npt.NDArray[np.uint64],
    held_out_questions: list[int],
    section: PromptsSection,
) -> Selection:
    """Decide about every row.

    Args:
        rows: [n] of :data:`dspark.data.sieve.ROW`.
        signatures: [n, ENTRIES]; not read unless near duplicates are looked for.
        beginnings: [m, 2], (row, key) of shorter conversations that rows begin with.
        held_out_questions: keys of all questions and later turns of held-out rows.
        section: the recipe's prompts.
    """
    count = len(rows)
    result = Selection(np.zeros(count, np.uint8), np.arange(count, dtype=np.int64))
    known = np.array(held_out_questions, dtype=np.uint64)
    asked = ~rows["held_out"] & (rows["question"] != 0) & np.isin(rows["question"], known)
    result.step[asked] = STEPS.index("in_held_out")
    order = np.lexsort((np.arange(count), ~rows["held_out"]))
    _duplicates(rows, order[result.step[order] == 0], result)
    _begun(rows, beginnings, result)
    if section.filters.near_duplicate is not None:
        left = order[(result.step[order] == 0) & rows["compared"][order]]
        first = clusters(signatures, left, section.filters.near_duplicate.threshold)
        lost = first != np.arange(len(left))
        result.step[left[lost]] = STEPS.index("near_duplicate")
        result.kept_for[left[lost]] = left[first[lost]]
    if section.shares:
        _shares(rows, section, result)
    return result


def _duplicates(rows: npt.NDArray[Any], order: Indices, result: Selection) -> None:
    keys = rows["key"][order]
    by_key = np.lexsort((np.arange(len(order)), keys[:, 1], keys[:, 0]))
    keys = keys[by_key]
    same = np.zeros(len(order), dtype=np.bool_)
    same[1:] = (keys[1:] == keys[:-1]).all(axis=1)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    lost = order[by_key[same]]
    result.step[lost] = STEPS.index("duplicate")
    result.kept_for[lost] = order[by_key[first[same]]]


def _begun(rows: npt.NDArray[Any], beginnings: npt.NDArray[np.uint64], result: Selection) -> None:
    """Drop conversations that a longer one begins with: logs hold every state of a conversation."""
    owner = beginnings[:, 0].astype(np.int64)
    alive = result.step[owner] == 0
    known, owner = beginnings[alive, 1], owner[alive]
    order = np.argsort(known, kind="stable")
    known, owner = known[order], owner[order]
    free = np.flatnonzero(result.step == 0)
    keys = rows["key"][free, 0]
    at = np.searchsorted(known, keys)
    inside = at < len(known)
    free, keys, at = free[inside], keys[inside], at[inside]
    equal = known[at] == keys
    result.step[free[equal]] = STEPS.index("duplicate")
    result.kept_for[free[equal]] = owner[at[equal]]
    # What was kept for a row that has gone now is kept for the one it went for.
    while not np.array_equal(further := result.kept_for[result.kept_for], result.kept_for):
        result.kept_for[:] = further


def _shares(rows: npt.NDArray[Any], section: PromptsSection, result: Selection) -> None:
    """Keep, of each limited category's training rows, those with the smallest keys.

    Keys are hashes of the content, so that is a uniform sample, and the same rows are chosen when
    other rows are added or removed around them.
    """
    categories = np.array([source.category for source in section.sources])
    free = (result.step == 0) & ~rows["held_out"]
    names = categories[rows["source"]] if len(rows) else np.zeros(0, dtype=str)
    limits = share_limits(section.shares, section.rows, Counter(names[free].tolist()))
    for category, limit in limits.items():
        own = np.flatnonzero(free & (names == category))
        by_key = own[np.argsort(rows["key"][own, 0], kind="stable")]
        result.step[by_key[limit:]] = STEPS.index("quota")


def share_limits(
    shares: tuple[Share, ...], rows: int | None, available: Counter[str]
) -> dict[str, int]:
    """Most rows of each category that has a share.

    A category's part by weight is never made up by another one: the mixture is what was asked for,
    and the report says where a category fell short.
    """
    limits = {share.category: available[share.category] for share in shares}
    for share in shares:
        if share.quota is not None:
            limits[share.category] = min(limits[share.category], share.quota)
    weights = {share.category: share.weight for share in shares if share.weight is not None}
    if weights:
        total = sum(weights.values())
        if rows is None:
            rows = int(min(limits[name] * total / weight for name, weight in weights.items()))
        for name, weight in weights.items():
            limits[name] = min(limits[name], int(rows * weight / total))
    return limits


__all__ = ["STEPS", "Selection", "select", "share_limits"]
