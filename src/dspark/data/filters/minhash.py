"""MinHash signatures and the clusters of prompts that are nearly the same.

Broder, "On the resemblance and containment of documents" (1997), with banding as in Leskovec,
Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3. The fraction of equal entries of two
signatures estimates the Jaccard similarity of their sets of word shingles (standard error at most
0.044 with 128 entries).

Signatures are computed for thousands of rows at once and keep 16 bits of each minimum, 256 bytes a
row. Four neighbouring entries are one 64-bit band, so banding needs no further hashing: rows with a
band in common are candidates (similarity 0.7: found with probability 0.9998), and a candidate
counts only if its whole signature agrees. Clusters are found band by band over all rows, with
sorting instead of a table of bands, which is what keeps memory flat: about 60 bytes a row, the
signatures themselves staying on disk.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspark.data.filters.units import Indices, Units, window_hashes

ENTRIES = 128
BAND = 4
Signatures = npt.NDArray[np.uint16]
_PAIRS_AT_ONCE = 1 << 16


def _multipliers() -> npt.NDArray[np.uint64]:
    values = np.random.Generator(np.random.PCG64(20260714)).integers(
        1, 2**63, size=(2, ENTRIES), dtype=np.uint64
    )
    values[0] |= np.uint64(1)
    return values


def signatures(units: Units, rows: int, shingle: int) -> Signatures:
    """Signatures of ``rows`` rows, [rows, ENTRIES]; a row of fewer words is one shingle.

    A row without any word gets a signature of its own that equals those of other such rows.
    """
    counts = np.bincount(units.row_of, minlength=rows).astype(np.int64)
    starts = np.cumsum(counts) - counts
    hashes = window_hashes(units.hashes, shingle)
    full = counts >= shingle
    windows = np.where(full, counts - shingle + 1, 1)
    first = np.cumsum(windows) - windows
    shingles = np.zeros(int(windows.sum()), dtype=np.uint64)
    inside = np.repeat(full, windows)
    offset = np.arange(len(shingles)) - np.repeat(first, windows)
    place = np.repeat(starts, windows) + offset
    shingles[inside] = hashes[place[inside]]
    for row in np.flatnonzero(~full & (counts > 0)):
        own = units.hashes[starts[row] : starts[row] + counts[row]]
        shingles[first[row]] = window_hashes(own, len(own))[0]
    result = np.empty((rows, ENTRIES), dtype=np.uint16)
    multipliers, addends = _multipliers()
    for entry in range(ENTRIES if rows else 0):
        mixed = shingles * multipliers[entry]
        mixed += addends[entry]
        minima = np.minimum.reduceat(mixed, first)
        # Of a minimum the highest bits are mostly zero, and the lowest know little of the shingle.
        result[:, entry] = ((minima >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.uint16)
    return result


def clusters(table: Signatures, order: Indices, threshold: float) -> Indices:
    """For each of ``order``'s rows, the position of the first row of its cluster.

    Args:
        table: signatures of all rows, may be a memory map.
        order: the rows to compare, most precious first.
        threshold: least estimated Jaccard similarity.

    Returns:
        [len(order)], values are positions in ``order``; a row alone points to itself.
    """
    parent = np.arange(len(order), dtype=np.int64)
    bands = table.view(np.uint64)
    for band in range(bands.shape[1] if len(order) else 0):
        column = np.asarray(bands[:, band])[order]
        by_value = np.argsort(column, kind="stable")
        column = column[by_value]
        same = np.flatnonzero(column[1:] == column[:-1]) + 1
        if not len(same):
            continue
        group = np.maximum.accumulate(
            np.where(
                np.diff(column, prepend=column[0] ^ np.uint64(1)) != 0, np.arange(len(column)), 0
            )
        )
        # The first row of the bucket and the neighbour: a star and a chain find most of a cluster.
        left = np.concatenate([by_value[group[same]], by_value[same - 1]])
        right = np.concatenate([by_value[same], by_value[same]])
        apart = parent[left] != parent[right]
        left, right = left[apart], right[apart]
        keep = _similar(table, order[left], order[right], threshold)
        parent = _joined(parent, left[keep], right[keep])
    return parent


def _similar(
    table: Signatures, left: Indices, right: Indices, threshold: float
) -> npt.NDArray[np.bool_]:
    result = np.zeros(len(left), dtype=np.bool_)
    for start in range(0, len(left), _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        equal = np.asarray(table[left[part]]) == np.asarray(table[right[part]])
        result[part] = equal.mean(axis=1) >= threshold
    return result


def _joined(parent: Indices, left: Indices, right: Indices) -> Indices:
    """Labels after joining pairs: every row carries the smallest position of its component."""
    while len(left):
        before = parent.copy()
        low = np.minimum(parent[left], parent[right])
        for side in (left, right):
            np.minimum.at(parent, parent[side], low)
            np.minimum.at(parent, side, low)
        while True:
            shorter = parent[parent]
            if np.array_equal(shorter, parent):
                break
            parent = shorter
        if np.array_equal(before, parent):
            break
    return parent
