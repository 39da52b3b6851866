"""Capacity of the row cache and the prefix that prompts share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import DecodingError
from dspark.model.cache import RowCache, shared_prefix
from dspark.model.spans import Span

CPU = torch.device("cpu")


def test_a_forward_beyond_the_capacity_is_refused_before_anything_is_written() -> None:
    cache = RowCache(1, 1, 4, ((1, 2),), torch.float32, CPU)
    rows = torch.ones(1, 3, 1, 2)
    cache.append(0, Span.at(0, 3, 1, CPU), rows)
    with pytest.raises(DecodingError, match="reaches token 5"):
        cache.append(0, Span.at(2, 3, 1, CPU), 2 * rows)
    kept = cache.append(0, Span.at(3, 1, 1, CPU), 3 * rows[:, :1])[0][0]
    assert kept[0, 0, :, 0].tolist() == [1, 1, 1, 3]


@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=5),
    st.integers(1, 8),
)
def test_shared_prefix_is_the_longest_that_leaves_every_sequence_a_token(
    head: list[int], tails: list[list[int]], least: int
) -> None:
    sequences = [head + tail for tail in tails]
    length = shared_prefix(sequences, least)
    longest = 0
    while all(len(s) > longest + 1 and s[longest] == sequences[0][longest] for s in sequences):
        longest += 1
    assert length == (longest if longest >= least else 0)


def test_one_sequence_shares_nothing() -> None:
    assert shared_prefix([[1] * 40]) == 0
    assert shared_prefix([]) == 0
