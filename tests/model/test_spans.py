"""Flat tokens of many requests in attention: every query sees its own request's keys up to its own
position, however the requests are grouped and padded."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.model import spans
from dspark.model.spans import PagedSpan, Segment, groups_of

CPU = torch.device("cpu")
PAGE, ROWS = 4, 800


def span_of(lengths: Sequence[int], starts: Sequence[int]) -> PagedSpan:
    pages = [list(range(200 * n, 200 * n + 200)) for n in range(len(lengths))]
    rows = zip(pages, starts, lengths, strict=True)
    segments = [Segment(own, start, length) for own, start, length in rows]
    return PagedSpan.of(segments, PAGE, ROWS * len(lengths), CPU)


def seen(
    queries: Sequence[Tensor], rows: Sequence[Tensor], mask: Tensor | None, causal: bool
) -> Tensor:
    """[B, T, 2]: the query itself, and the sum of the keys it may see."""
    (q,), (key,) = queries, rows
    if causal:
        mask = torch.ones(q.shape[1], key.shape[1], dtype=torch.bool).tril()
    if mask is None:
        mask = torch.ones(q.shape[1], key.shape[1], dtype=torch.bool)
    allowed = mask.view(-1, *mask.shape[-2:])
    return torch.stack([q, (allowed * key.unsqueeze(1)).sum(-1)], -1)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=12))
def test_every_token_sees_its_own_keys_up_to_itself_exactly(
    requests: list[tuple[int, int]],
) -> None:
    lengths, starts = zip(*requests, strict=True)
    for least in (1, 10**9):
        with patch.object(spans, "SAVED", least):
            span = span_of(lengths, starts)
        assert least == 1 or len(span.groups) == 1
        spare = ROWS * len(lengths)
        # The key of row r is 1 + 1000 r, counted in its request: sums tell how far a query sees.
        rows = [g.reads.rows for g in span.groups]
        keys = [torch.where(r == spare, 1e6, 1.0 + 1000.0 * (r % ROWS)).double() for r in rows]
        flat = torch.arange(sum(lengths), dtype=torch.float64).unsqueeze(0)
        out = span.over(seen, (flat,), [(key,) for key in keys])[0]
        assert out[:, 0].tolist() == list(range(sum(lengths)))
        ends = span.positions[0].double() + 1
        assert torch.equal(out[:, 1], ends + 1000.0 * ends * (ends - 1) / 2)
        places = [s + t for s, n in zip(starts, lengths, strict=True) for t in range(n)]
        assert span.positions[0].tolist() == places
        assert (span.slots % ROWS).tolist() == places


@pytest.mark.parametrize(
    ("requests", "groups"),
    [
        ([(1, 300)] * 31 + [(8, 300)], [(0, 31), (31, 32)]),  # one drafts
        ([(1, 60)] * 31 + [(1, 4000)], [(0, 31), (31, 32)]),  # one is long
        ([(1, 60)] * 20 + [(1, 900)] * 6 + [(8, 900)] * 6, [(0, 20), (20, 26), (26, 32)]),
        ([(8, 300)] * 8, [(0, 8)]),
        ([(1, 300), (1, 310), (1, 330)], [(0, 3)]),
        ([(1, 9), (8, 9)], [(0, 2)]),
    ],
)
def test_requests_are_parted_where_padding_would_cost_more_than_another_call(
    requests: list[tuple[int, int]], groups: list[tuple[int, int]]
) -> None:
    assert groups_of([Segment([], start, length) for length, start in requests]) == groups


def test_one_long_request_is_not_what_all_others_read() -> None:
    span = span_of([1] * 8, [8] * 7 + [ROWS - 1])
    assert [g.reads.rows.shape for g in span.groups] == [(7, 9), (1, ROWS)]
