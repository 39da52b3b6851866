"""Many texts as one long sequence of words (or tokens) and one array of their hashes.

Both n-gram decontamination and MinHash look at windows over words. Python objects are touched once
a word here; everything after works on a NumPy array. Hashes are 64 bits of BLAKE2b of the word, the
same in every process, and computed once for each distinct word.

Words are what remains of a case-folded text without punctuation. Scripts written without spaces
(Han, Kana) are cut into characters, since a whole sentence is no word.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_WORD = re.compile(r"\w+")
_SPACELESS = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
# ASCII text needs no regular expression: everything that is no letter, digit or _ is a space.
_ASCII = {c: " " for c in range(128) if not (chr(c).isalnum() or chr(c) == "_")}
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Units:
    """Texts of several rows, one after another.

    ``units`` are words or token ids, ``hashes`` [n] their hashes; ``text_of`` and ``row_of`` [n]
    say which text and which row each belongs to, both ascending.
    """

    units: list[Any]
    hashes: Hashes
    text_of: Indices
    row_of: Indices


def words_of(text: str) -> list[str]:
    """Words of one text, case-folded and without punctuation."""
    if text.isascii():
        return text.lower().translate(_ASCII).split()
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_SPACELESS.sub(r" \1 ", folded))


def word_units(rows: Iterable[Sequence[str]]) -> Units:
    """Words of rows of texts."""
    return _units([[words_of(text) for text in texts] for texts in rows])


def token_units(rows: Iterable[Sequence[Sequence[int]]]) -> Units:
    """Token ids of rows of texts."""
    return _units([list(texts) for texts in rows])


def window_hashes(hashes: Hashes, size: int) -> Hashes:
    """Polynomial hash of every window of ``size`` units: [n - size + 1], modulo 2^64."""
    count = max(len(hashes) - size + 1, 0)
    result = np.zeros(count, dtype=np.uint64)
    for place in range(size if count else 0):
        result *= _BASE
        result += hashes[place : place + count]
    # The last unit enters almost plainly; mixing spreads it over the high bits that are looked at.
    result ^= result >> np.uint64(31)
    result *= np.uint64(0xBF58476D1CE4E5B9)
    result ^= result >> np.uint64(29)
    return result


def _units(rows: list[list[Sequence[Any]]]) -> Units:
    units = [unit for texts in rows for text in texts for unit in text]
    table = {unit: _hash(unit) for unit in dict.fromkeys(units)}
    hashes = np.fromiter(map(table.__getitem__, units), dtype=np.uint64, count=len(units))
    lengths = np.array([len(text) for texts in rows for text in texts], dtype=np.int64)
    owners = np.array([number for number, texts in enumerate(rows) for _ in texts], dtype=np.int64)
    return Units(
        units,
        hashes,
        np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
        np.repeat(owners, lengths),
    )


def _hash(unit: Any) -> int:
    text = unit if isinstance(unit, str) else f"\0{unit}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
