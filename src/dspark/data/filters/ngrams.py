"""Which training prompts share an n-gram with an evaluation item: exact, and fast enough for all.

The usual 13-gram rule (Brown et al., "Language Models are Few-Shot Learners", appendix C, arXiv
2005.14165). Every window of n words of a prompt is hashed at once; a bitmap over the top bits of
the evaluation windows' hashes rejects nearly all, a binary search most of the rest, and what is
left is compared word by word. So a hash collision costs a comparison and never a prompt.

Items shorter than n are compared as a whole: contained in the prompt if they have at least
``SHORTEST`` words, equal to one whole turn if fewer, because "hello there" is in everything.
Windows never span two texts. n-grams that many items share are the benchmark's own wrapper, not its
content.

Memory: about 26 bytes for each distinct evaluation n-gram plus 16 MiB, whatever the number of
prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.data.filters.units import Hashes, Indices, Units, window_hashes

SHORTEST = 6
HITS_PER_ROW = 3
_BITS = 24


@dataclass(frozen=True)
class Hit:
    """Row ``row`` holds ``ngram``, which is in item ``item`` (both counted from 0)."""

    row: int
    item: int
    ngram: tuple[Any, ...]


@dataclass(frozen=True)
class _Grams:
    """Distinct evaluation windows of one size: sorted hashes, and a unit position of each."""

    hashes: Hashes
    place: Indices
    bitmap: npt.NDArray[np.bool_]


class NgramIndex:
    """N-grams of evaluation items. ``items`` are the rows of ``units``."""

    def __init__(self, units: Units, ngram: int, template_items: int) -> None:
        """
        Args:
            units: words or tokens of all items.
            ngram: window size n.
            template_items: an n-gram in more items than this is not compared.
        """
        self._units = units
        self.ngram = ngram
        self.ignored = 0
        ends = np.flatnonzero(np.diff(units.text_of, append=-1)) + 1
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        if not len(units.units):
            starts = ends = starts[:0]
        lengths = ends - starts
        self._sizes: dict[int, _Grams] = {}
        self._whole: dict[tuple[Any, ...], int] = {}
        for size in sorted({min(int(n), ngram) for n in lengths if n >= SHORTEST}):
            # Only texts of exactly this size, or long enough for a full n-gram.
            allowed = lengths >= ngram if size == ngram else lengths == size
            self._sizes[size] = self._grams(size, starts[allowed], ends[allowed], template_items)
        for start, end in zip(starts[lengths < SHORTEST], ends[lengths < SHORTEST], strict=True):
            text = tuple(units.units[start:end])
            self._whole.setdefault(text, int(units.row_of[start]))

    def _grams(self, size: int, starts: Indices, ends: Indices, template_items: int) -> _Grams:
        counts = ends - size + 1 - starts
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        place = np.repeat(starts, counts) + offset
        hashes = window_hashes(self._units.hashes, size)[place]
        order = np.argsort(hashes, kind="stable")
        hashes, place = hashes[order], place[order]
        new = np.diff(hashes, prepend=hashes[:1] ^ np.uint64(1)) != 0
        # How many different items hold each n-gram: count changes of item inside a group.
        items = self._units.row_of[place]
        changes = (np.diff(items, prepend=-1) != 0) | new
        held_by = np.add.reduceat(changes, np.flatnonzero(new)) if len(new) else np.zeros(0)
        rare = held_by <= template_items
        self.ignored += int((~rare).sum())
        hashes, place = hashes[new][rare], place[new][rare]
        bitmap = np.zeros(1 << _BITS, dtype=np.bool_)
        bitmap[hashes >> np.uint64(64 - _BITS)] = True
        return _Grams(hashes, place, bitmap)

    def hits(self, prompts: Units) -> list[Hit]:
        """Up to ``HITS_PER_ROW`` hits of each row, ordered by row; every one is a real match."""
        found: dict[int, dict[int, Hit]] = defaultdict(dict)
        for size, grams in reversed(self._sizes.items()):
            for start, place in zip(*_candidates(prompts, size, grams), strict=True):
                row, item = int(prompts.row_of[start]), int(self._units.row_of[place])
                if item in found[row] or len(found[row]) >= HITS_PER_ROW:
                    continue
                text = prompts.units[start : start + size]
                if text == self._units.units[place : place + size]:
                    found[row][item] = Hit(row, item, tuple(text))
        self._whole_turns(prompts, found)
        return [hit for row in sorted(found) for hit in found[row].values()]

    def _whole_turns(self, prompts: Units, found: dict[int, dict[int, Hit]]) -> None:
        if not self._whole or not prompts.units:
            return
        edges = np.flatnonzero(np.diff(prompts.text_of, prepend=-1, append=-1))
        lengths = np.diff(edges)
        for start, length in zip(edges[:-1], lengths, strict=True):
            if length >= SHORTEST:
                continue
            text = tuple(prompts.units[start : start + length])
            if (item := self._whole.get(text)) is not None:
                row = int(prompts.row_of[start])
                found[row].setdefault(item, Hit(row, item, text))


def _candidates(prompts: Units, size: int, grams: _Grams) -> tuple[list[int], list[int]]:
    """Starts in ``prompts`` and places among the items whose windows have equal hashes."""
    hashes = window_hashes(prompts.hashes, size)
    maybe = np.flatnonzero(grams.bitmap[hashes >> np.uint64(64 - _BITS)])
    inside = prompts.text_of[maybe] == prompts.text_of[maybe + size - 1]
    maybe = maybe[inside]
    at = np.searchsorted(grams.hashes, hashes[maybe])
    at[at == len(grams.hashes)] = 0
    equal = grams.hashes[at] == hashes[maybe] if len(grams.hashes) else np.zeros(0, dtype=bool)
    return maybe[equal].tolist(), grams.place[at[equal]].tolist()


def readable(ngram: Sequence[Any], decode: Any = None) -> str:
    """An n-gram as text: words joined by spaces, tokens through ``decode``."""
    if decode is not None:
        return str(decode(list(ngram)))
    return " ".join(map(str, ngram))
