"""Distributions, draws and random streams."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decoding.params import SamplingParams
from dspark.decoding.sampling import (
    STREAMS,
    RandomStreams,
    _flatten_impossible,
    safe_argmax,
    sample,
    target_probabilities,
)
from dspark.errors import DecodingError

GREEDY = SamplingParams()
INF, NAN = math.inf, math.nan
UNIFORM = st.floats(0, 1)
WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.floats(0.0, 1e-12)), min_size=1, max_size=40
).filter(lambda row: sum(row) > 1e-25)


def log_of(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", 1e-9),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", NAN),
        ("seed", -1),
        ("seed", 2**63),
        ("max_new_tokens", 0),
    ],
)
def test_senseless_parameter_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(DecodingError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_argmax_takes_nan_as_minus_infinity_and_the_lowest_tied_id() -> None:
    logits = torch.tensor([[NAN, 1.0, 3.0, 3.0], [-INF, NAN, -5.0, -INF], [2.0, 2.0, 1.0, 0.0]])
    assert safe_argmax(logits).tolist() == [2, 2, 0]
    assert int(safe_argmax(logits[1].bfloat16())) == 2


@pytest.mark.parametrize("row", [[NAN, NAN], [-INF, -INF], [NAN, -INF], [INF, 0.0]])
def test_argmax_of_a_row_without_finite_maximum_is_refused(row: list[float]) -> None:
    with pytest.raises(DecodingError, match=r"first at index \[1\]"):
        safe_argmax(torch.tensor([[0.0, 1.0], row]))


def test_temperature_zero_is_the_one_hot_of_the_argmax() -> None:
    probs = target_probabilities(torch.tensor([[0.0, 5.0, 5.0], [NAN, -3.0, -INF]]), GREEDY)
    assert probs.tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
def test_non_finite_row_is_refused_and_named(row: list[float]) -> None:
    logits = torch.zeros(2, 3, 3)
    logits[1, 2] = torch.tensor(row)
    with pytest.raises(DecodingError, match=r"row \[1, 2\]"):
        target_probabilities(logits, SamplingParams(temperature=1.0))


def test_masked_tokens_get_no_probability() -> None:
    logits = torch.tensor([0.0, -INF, 0.0])
    assert target_probabilities(logits, SamplingParams(temperature=1.0)).tolist() == [0.5, 0, 0.5]


def test_temperature_divides_logits_and_dtype_follows_float64() -> None:
    logits = log_of(0.5, 0.3, 0.2)
    probs = target_probabilities(logits, SamplingParams(temperature=0.5))
    assert probs.dtype == torch.float64
    assert probs.tolist() == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=1e-15)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = target_probabilities(logits.to(dtype), SamplingParams(temperature=0.5))
        assert narrow.dtype == torch.float32


def test_smallest_temperature_with_huge_logits_stays_finite() -> None:
    probs = target_probabilities(torch.tensor([3e38, -3e38, 0.0]), SamplingParams(temperature=1e-5))
    assert probs.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0.5, 0.2]),
        ({"top_k": 99}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        ({"top_p": 0.5}, [0.5]),
        ({"top_p": 0.51}, [0.5, 0.2]),
        ({"top_p": 1e-9}, [0.5]),
        ({"min_p": 0.25}, [0.5, 0.2, 0.15]),
        ({"min_p": 1.0}, [0.5]),
        # top_p measures mass among the survivors of top_k: 0.5 / 0.7 < 0.75.
        ({"top_k": 2, "top_p": 0.75}, [0.5, 0.2]),
        ({"top_k": 2, "top_p": 0.7}, [0.5]),
        # ... and of min_p, which runs before it: 0.7 / 0.85 = 0.82 >= 0.8, while 0.7 < 0.8.
        ({"min_p": 0.25, "top_p": 0.8}, [0.5, 0.2]),
    ],
)
def test_truncation_keeps_exactly_the_tokens_worked_out_by_hand(
    params: dict[str, float], kept: list[float]
) -> None:
    logits = log_of(0.1, 0.5, 0.05, 0.15, 0.2)
    probs = target_probabilities(logits, SamplingParams(temperature=1.0, **params))  # type: ignore[arg-type]
    wanted = [w / sum(kept) if w in kept else 0.0 for w in (0.1, 0.5, 0.05, 0.15, 0.2)]
    assert probs.tolist() == pytest.approx(wanted, abs=1e-14)


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = log_of(0.2, 0.4, 0.2, 0.2)
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
    ):
        assert (target_probabilities(logits, params) > 0).all()


def test_wide_nucleus_falls_back_to_the_full_sort() -> None:
    """5000 equal tokens and one heavy: 0.9 of the mass is far more than the candidate list."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(5000, generator=generator, dtype=torch.float64)
    probs = target_probabilities(logits, SamplingParams(temperature=1.0, top_p=0.9))
    full = torch.softmax(logits, -1)
    ranked = full.sort(descending=True)
    count = int((ranked.values.cumsum(0) < 0.9).sum()) + 1
    assert set(probs.nonzero().flatten().tolist()) == set(ranked.indices[:count].tolist())


@given(row=WEIGHTS, u=UNIFORM)
@settings(max_examples=300, deadline=None)
def test_sample_never_returns_an_impossible_id(row: list[float], u: float) -> None:
    for dtype in (torch.float32, torch.float64):
        probs = torch.tensor(row, dtype=dtype)
        for draw in (u, 0.0, 5e-324, 1.0 - 2**-53, 1.0):
            assert probs[int(sample(probs, torch.tensor(draw, dtype=torch.float64)))] > 0


@given(row=WEIGHTS, u=st.floats(1e-6, 1.0))
@settings(max_examples=200, deadline=None)
def test_sample_inverts_the_cumulative_sum(row: list[float], u: float) -> None:
    probs = torch.tensor(row, dtype=torch.float64)
    chosen = int(sample(probs, torch.tensor(u, dtype=torch.float64)))
    below, total = math.fsum(row[:chosen]), math.fsum(row)
    assert below <= u * total * (1 + 1e-12)
    assert u * total <= (below + row[chosen]) * (1 + 1e-12)


def test_rounding_of_a_parallel_scan_cannot_select_an_impossible_id() -> None:
    """A device's scan that steps up at zero-probability ids 0 and 2, and down at id 4."""
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    scanned = torch.tensor([1e-17, 0.5, 0.5 + 1e-16, 1.0, 1.0 - 1e-16], dtype=torch.float64)
    cdf = _flatten_impossible(scanned, probs)
    assert cdf.tolist() == [0.0, 0.5, 0.5, 1.0, 1.0]


def test_sample_is_row_wise_over_any_leading_shape() -> None:
    probs = torch.eye(6).reshape(2, 3, 6)
    u = torch.full((2, 3), 0.7, dtype=torch.float64)
    assert sample(probs, u).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("row", [[0.0, 0.0], [NAN, 1.0], [INF, 1.0], [-0.1, 1.1]])
def test_sample_refuses_rows_that_are_no_distribution(row: list[float]) -> None:
    with pytest.raises(DecodingError, match=r"probs row \[\]"):
        sample(torch.tensor(row), torch.tensor(0.5))


@pytest.mark.parametrize("u", [-0.1, 1.1, NAN])
def test_sample_refuses_uniforms_outside_the_unit_interval(u: float) -> None:
    with pytest.raises(DecodingError, match="uniforms"):
        sample(torch.tensor([0.5, 0.5]), torch.tensor(u))


def test_sample_refuses_a_missing_uniform() -> None:
    with pytest.raises(DecodingError, match="one uniform per row"):
        sample(torch.ones(3, 4), torch.rand(2))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    wanted = probs * counts.sum()
    live = wanted > 0
    return float(((counts - wanted)[live] ** 2 / wanted[live]).sum())


def test_chi_square_of_draws_fits_and_convicts_a_slightly_wrong_distribution() -> None:
    draws = 40_000
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, generator=generator, dtype=torch.float64)
    probs = target_probabilities(logits, SamplingParams(temperature=1.0, top_k=20))
    u = RandomStreams(11).uniform("residual", draws)
    ids = sample(probs.expand(draws, -1), u)
    counts = torch.bincount(ids, minlength=30).double()
    freedom = int((probs > 0).sum()) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom)
    assert counts[probs == 0].sum() == 0
    assert chi_square(counts, probs) < limit
    warmer = torch.where(probs > 0, probs**0.9, 0.0)
    assert chi_square(counts, warmer / warmer.sum()) > limit


def test_streams_are_reproducible_and_do_not_move_one_another() -> None:
    first, second = RandomStreams(5), RandomStreams(5)
    second.uniform("draft", 1000)
    second.uniform("accept", 3)
    assert torch.equal(first.uniform("residual", 50), second.uniform("residual", 50))
    pieces = torch.cat([first.uniform("accept", 2), first.uniform("accept", 3)])
    assert torch.equal(pieces, RandomStreams(5).uniform("accept", 5))


def test_streams_are_disjoint_across_names_and_seeds() -> None:
    """No value occurs twice among 60 000 draws of 53 bits, and no two streams correlate."""
    seeds = (0, 1, 2**32, 2**32 + 1)  # PyTorch alone would give 0 and 2**32 the same stream
    made = [RandomStreams(seed).uniform(name, 5000) for seed in seeds for name in STREAMS]
    assert len(set(torch.cat(made).tolist())) == 5000 * len(made)
    correlation = torch.corrcoef(torch.stack(made)).fill_diagonal_(0).abs().max()
    assert float(correlation) < 5 / math.sqrt(5000)


def test_uniforms_are_in_the_half_open_interval() -> None:
    u = RandomStreams(0).uniform("accept", 100_000)
    assert u.dtype == torch.float64
    assert float(u.min()) > 0
    assert float(u.max()) <= 1
    assert float(u.mean()) == pytest.approx(0.5, abs=5e-3)


def test_raw_zero_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator's 0 comes once in 2**53 draws: put it there. u = 0 would pass every test."""
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.zeros(n, dtype=torch.float64))
    assert RandomStreams(0).uniform("accept", 2).tolist() == [1.0, 1.0]


def test_unknown_stream_is_refused() -> None:
    with pytest.raises(DecodingError, match="bonus"):
        RandomStreams(0).uniform("bonus", 1)  # type: ignore[arg-type]
