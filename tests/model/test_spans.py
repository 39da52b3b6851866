"""Flat tokens of many requests in attention: every query sees its own request's keys up to its own
position, however the requests are grouped and padded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.model.spans import SAVED, PagedSpan, Segment

CPU = torch.device("cpu")
PAGE = 4


def span_of(lengths: Sequence[int], starts: Sequence[int]) -> PagedSpan:
    pages = [list(range(20 * n, 20 * n + 20)) for n in range(len(lengths))]
    rows = zip(pages, starts, lengths, strict=True)
    segments = [Segment(own, start, length) for own, start, length in rows]
    return PagedSpan.of(segments, PAGE, 20 * PAGE * len(lengths), CPU)


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


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=12))
def test_every_token_sees_its_own_keys_up_to_itself_exactly(
    requests: list[tuple[int, int]],
) -> None:
    lengths, starts = zip(*requests, strict=True)
    span = span_of(lengths, starts)
    # The key of row r is 2^-(place in its request): sums tell how far a query sees.
    rows = span.reads.rows
    place = torch.where(rows == 20 * PAGE * len(lengths), 0, rows % (20 * PAGE))
    key = torch.where(rows == 20 * PAGE * len(lengths), 1e6, 1.0 + 1000.0 * place).double()
    flat = torch.arange(sum(lengths), dtype=torch.float64).unsqueeze(0)
    out = span.over(seen, (flat,), (key,))[0]
    assert out[:, 0].tolist() == list(range(sum(lengths)))
    ends = span.positions[0].double() + 1
    assert torch.equal(out[:, 1], ends + 1000.0 * ends * (ends - 1) / 2)


def test_one_long_block_does_not_pad_requests_that_draft_nothing() -> None:
    span = span_of([1] * 31 + [8], [30] * 32)
    assert [(g.requests.start, g.requests.stop) for g in span.groups] == [(0, 31), (31, 32)]
    shapes: list[tuple[int, ...]] = []

    def attend(
        queries: Sequence[Tensor], rows: Sequence[Tensor], mask: Tensor | None, causal: bool
    ) -> Tensor:
        shapes.append(tuple(queries[0].shape))
        return queries[0]

    span.over(attend, (torch.zeros(1, 39),), (torch.zeros(32, span.reads.length),))
    assert shapes == [(31, 1), (1, 8)]


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [([8] * 4, 1), ([1] * 4, 1), ([1, 8], 1), ([1] * (SAVED // 7 + 1) + [8], 2), ([7, 8] * 7, 1)],
)
def test_groups_are_made_where_they_save_padding(lengths: list[int], groups: int) -> None:
    assert len(span_of(lengths, [9] * len(lengths)).groups) == groups
