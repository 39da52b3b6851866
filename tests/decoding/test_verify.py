"""Rules on hand-worked cases, their algebra as properties, and every refusal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.decoding.verify import (
    Rule,
    acceptance_thresholds,
    check_modes,
    decide,
    decide_greedy,
    residual,
)
from dspark.errors import DecodingError

SEED = st.integers(0, 2**31)
SAMPLED: tuple[Rule, ...] = ("standard", "block")


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def uniforms(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two drafted tokens, both id 0. Ratios 0.2/0.4 = 0.5 and 0.6/0.3 = 2: the second buys the first
# back. Block: r = (0.5, 1). R_1 = max(.3-.3,0) + max(.1-.6,0) + max(.1-.1,0) = 0, so h = (0, 1).
P = f64([0.2, 0.5, 0.3], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8])
Q = f64([0.4, 0.3, 0.3], [0.3, 0.6, 0.1])
IDS = torch.tensor([0, 0])


def random_case(seed: int, n: int, vocabulary: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n + 1, vocabulary, generator=g, dtype=torch.float64), -1)
    q = torch.softmax(2 * torch.randn(n, vocabulary, generator=g, dtype=torch.float64), -1)
    ids = torch.randint(vocabulary, (n,), generator=g)
    return p, q, ids, 1 - torch.rand(n, generator=g, dtype=torch.float64)


def one_hot(ids: Tensor, vocabulary: int) -> Tensor:
    return torch.nn.functional.one_hot(ids, vocabulary).double()


def test_standard_thresholds_and_residual_by_hand() -> None:
    assert acceptance_thresholds("standard", P, Q, IDS).tolist() == pytest.approx([0.5, 1.0])
    rejected = decide("standard", P, Q, IDS, uniforms(0.51, 0.5))
    assert rejected.accepted == 0
    assert rejected.next_probs.tolist() == pytest.approx([0, 1, 0])  # only id 1 is owed: 0.5 - 0.3
    assert decide("standard", P, Q, IDS, uniforms(0.49, 1.0)).accepted == 2


def test_block_accepts_past_a_failed_test_where_standard_stops() -> None:
    assert acceptance_thresholds("block", P, Q, IDS).tolist() == pytest.approx([0.0, 1.0])
    decision = decide("block", P, Q, IDS, uniforms(0.9, 0.9))
    assert decision.accepted == 2
    assert decision.next_probs.tolist() == pytest.approx(P[2].tolist())


def test_block_threshold_and_scaled_residual_by_hand() -> None:
    """r_1 = 0.5; R_1 = max(.35 - .2, 0) + 0 + 0 = 0.15; h_1 = 0.15 / 0.65; r_2 = .5 * .1 / .4."""
    p = f64([0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [1, 0, 0])
    q = f64([0.4, 0.3, 0.3], [0.2, 0.4, 0.4])
    ids = torch.tensor([0, 2])
    assert acceptance_thresholds("block", p, q, ids).tolist() == pytest.approx([0.15 / 0.65, 0.125])
    decision = decide("block", p, q, ids, uniforms(0.2, 0.2))
    assert decision.accepted == 1
    assert decision.next_probs.tolist() == pytest.approx([1, 0, 0])
    assert decide("block", p, q, ids, uniforms(0.24, 0.13)).accepted == 0


def test_one_hot_draft_accepts_with_p_and_never_re_emits_the_rejected_token() -> None:
    assert acceptance_thresholds("standard", P, None, IDS).tolist() == pytest.approx([0.2, 0.6])
    rejected = decide("standard", P, None, IDS, uniforms(0.1, 0.7))
    assert rejected.accepted == 1
    assert rejected.next_probs.tolist() == pytest.approx([0, 0.5, 0.5])


@given(seed=SEED, n=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_explicit_point_mass_equals_the_implicit_one(seed: int, n: int) -> None:
    p, _, ids, u = random_case(seed, n)
    implicit = decide("standard", p, None, ids, u)
    explicit = decide("standard", p, one_hot(ids, 4), ids, u)
    assert explicit.accepted == implicit.accepted
    assert torch.allclose(explicit.next_probs, implicit.next_probs, atol=1e-14)


@given(seed=SEED, n=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_block_with_a_one_hot_draft_accepts_as_often_as_standard(seed: int, n: int) -> None:
    """Why the pair is refused: P(accepted >= i) is the product of p(x_1)..p(x_i) either way."""
    p, _, ids, _ = random_case(seed, n)
    h = acceptance_thresholds("block", p, one_hot(ids, 4), ids)
    at_least = 1 - (1 - h).flip(0).cumprod(0).flip(0)
    standard = acceptance_thresholds("standard", p, None, ids).cumprod(0)
    assert torch.allclose(at_least, standard, atol=1e-13)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_no_admitted_token_gives_the_targets_own_distribution(rule: Rule) -> None:
    none, no_uniforms = torch.zeros(0, dtype=torch.int64), uniforms()
    for q in (torch.zeros(0, 3), None) if rule == "standard" else (torch.zeros(0, 3),):
        decision = decide(rule, P[:1], q, none, no_uniforms)
        assert decision.accepted == 0
        assert decision.next_probs.tolist() == pytest.approx(P[0].tolist())


@given(seed=SEED, n=st.integers(0, 6), rule=st.sampled_from(SAMPLED))
@settings(max_examples=200, deadline=None)
def test_thresholds_are_probabilities_and_the_next_row_is_a_distribution(
    seed: int, n: int, rule: Rule
) -> None:
    p, q, ids, u = random_case(seed, n)
    h = acceptance_thresholds(rule, p.float(), q.float(), ids)
    assert h.shape == (n,)
    assert h.dtype == torch.float64
    assert bool(((h >= 0) & (h <= 1)).all())
    next_probs = decide(rule, p.float(), q.float(), ids, u).next_probs
    assert float(next_probs.min()) >= 0
    assert float(next_probs.sum()) == pytest.approx(1, abs=1e-12)


@given(seed=SEED, n=st.integers(1, 5), rule=st.sampled_from(SAMPLED))
@settings(max_examples=150, deadline=None)
def test_renaming_the_vocabulary_changes_nothing(seed: int, n: int, rule: Rule) -> None:
    p, q, ids, u = random_case(seed, n)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    renamed = torch.argsort(order)[ids]
    h = acceptance_thresholds(rule, p, q, ids)
    assert torch.allclose(h, acceptance_thresholds(rule, p[:, order], q[:, order], renamed))
    assume(bool(((h - u).abs() > 1e-9).all()))
    before, after = decide(rule, p, q, ids, u), decide(rule, p[:, order], q[:, order], renamed, u)
    assert before.accepted == after.accepted
    assert torch.allclose(before.next_probs[order], after.next_probs)


@given(seed=SEED, n=st.integers(1, 5), rule=st.sampled_from(SAMPLED))
@settings(max_examples=100, deadline=None)
def test_the_test_passes_up_to_its_threshold_and_not_beyond(seed: int, n: int, rule: Rule) -> None:
    """Ties the thresholds to the decision, so that enumerating by thresholds proves the latter."""
    p, q, ids, _ = random_case(seed, n)
    h = acceptance_thresholds(rule, p, q, ids)
    for slot in range(n):
        level = float(h[slot])
        # Block: everything else fails, slot decides alone. Standard: everything else passes.
        others = torch.where(h < 1, torch.nextafter(h, torch.tensor(2.0).double()), h)
        u = (others if rule == "block" else h.clone()).clamp_min(5e-324)
        if rule == "block" and bool((h[slot + 1 :] == 1).any()):
            continue
        if level > 0:
            u[slot] = level
            accepted = decide(rule, p, q, ids, u).accepted
            assert accepted == (slot + 1 if rule == "block" else n)
        if level < 1:
            u[slot] = math.nextafter(level, 2.0)
            accepted = decide(rule, p, q, ids, u).accepted
            assert accepted <= slot


@given(seed=SEED, n=st.integers(0, 6), agree=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_every_rule_equals_greedy_at_temperature_zero(seed: int, n: int, agree: float) -> None:
    g = torch.Generator().manual_seed(seed)
    best = torch.randint(4, (n + 1,), generator=g)
    keep = torch.rand(n, generator=g) < agree
    ids = torch.where(keep, best[:n], torch.randint(4, (n,), generator=g))
    u = 1 - torch.rand(n, generator=g, dtype=torch.float64)
    p, q = one_hot(best, 4), one_hot(ids, 4)
    accepted, token = decide_greedy(best, ids)
    wrong = (ids != best[:n]).nonzero()
    assert accepted == (int(wrong[0]) if len(wrong) else n)
    assert token == int(best[accepted])
    cases: list[tuple[Rule, Tensor | None]] = [
        ("greedy", None),
        ("greedy", q),
        ("standard", None),
        ("standard", q),
        ("block", q),
    ]
    for rule, draft in cases:
        decision = decide(rule, p, draft, ids, u)
        assert decision.accepted == accepted
        assert decision.next_probs.tolist() == one_hot(best[accepted], 4).tolist()


def test_equal_distributions_always_accept_everything() -> None:
    """r = 1 and no residual mass: the threshold's 0/0 is 1, also at u = 1."""
    p, _, ids, _ = random_case(0, 4)
    for rule in SAMPLED:
        assert acceptance_thresholds(rule, p, p[:4], ids).tolist() == [1, 1, 1, 1]
        assert decide(rule, p, p[:4], ids, torch.ones(4)).accepted == 4


def test_tiny_draft_probability_does_not_make_nan() -> None:
    p = f64([0.0, 1.0], [1.0, 0.0], [0.5, 0.5])
    q = f64([0.5, 0.5], [1e-320, 1.0])
    h = acceptance_thresholds("block", p, q, torch.tensor([0, 0]))
    assert h.tolist() == [0, 0]


def test_float32_sums_that_are_slightly_off_leave_no_bias() -> None:
    exact = decide("block", P, Q, IDS, uniforms(0.9, 0.9)).next_probs
    off = decide("block", P * 1.00005, Q * 0.99995, IDS, uniforms(0.9, 0.9)).next_probs
    assert torch.allclose(exact, off, atol=1e-15)


def test_residual_without_mass_is_the_target_itself() -> None:
    row = f64([0.25, 0.75])[0]
    assert residual(row, row).tolist() == [0.25, 0.75]
    assert residual(row, 1).tolist() == [1, 0]
    assert residual(row, row, 0.5).tolist() == [0.25, 0.75]


def test_modes_resolve_to_one_rule() -> None:
    assert check_modes("standard", "greedy", 1.0) == "standard"
    assert check_modes("standard", "probabilistic", 0.7) == "standard"
    assert check_modes("block", "probabilistic", 1.0) == "block"
    for verification in ("greedy", "standard", "block"):
        for method in ("greedy", "probabilistic"):
            assert check_modes(verification, method, 0.0) == "greedy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("block", "greedy", 1.0), "use draft_sample_method probabilistic"),
        (("greedy", "greedy", 1.0), "set temperature 0"),
        (("typical", "greedy", 0.0), "typical"),
        (("block", "argmax", 0.0), "argmax"),
        (("block", "probabilistic", -1.0), "temperature"),
        (("block", "probabilistic", math.nan), "temperature"),
    ],
)
def test_unsupported_mode_is_refused(arguments: tuple[str, str, float], message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        check_modes(*arguments)


HALF = uniforms(0.5, 0.5)


@pytest.mark.parametrize(
    ("rule", "p", "q", "ids", "u", "message"),
    [
        ("blocks", P, Q, IDS, HALF, "rule"),
        ("standard", P[:2], Q, IDS, HALF, r"shape \[3, V\]"),
        ("standard", P[0], Q, IDS, HALF, r"shape \[3, V\]"),
        ("standard", P, Q[:1], IDS, HALF, r"shape \[2, 3\]"),
        ("standard", P, Q[:, :2], IDS, HALF, r"shape \[2, 3\]"),
        ("standard", P, Q, IDS.int(), HALF, "int64"),
        ("standard", P, Q, torch.tensor([0, 3]), HALF, r"ids in \[0, 3\)"),
        ("standard", P, Q, torch.tensor([-1, 0]), HALF, r"ids in \[0, 3\)"),
        ("standard", P, Q, IDS, HALF[:1], r"u of shape \[2\]"),
        ("standard", P, Q, IDS, uniforms(0.0, 0.5), r"\(0, 1\]"),
        ("standard", P, Q, IDS, uniforms(0.5, 1.5), r"\(0, 1\]"),
        ("standard", P, Q, IDS, uniforms(0.5, math.nan), r"\(0, 1\]"),
        ("standard", P.log(), Q, IDS, HALF, "sum to 1"),
        ("standard", P, Q * math.nan, IDS, HALF, "sum to 1"),
        ("standard", P.half(), Q, IDS, HALF, "float32 or float64"),
        ("standard", P + f64([0.5, -0.5, 0.0]), Q, IDS, HALF, "non-negative"),
        ("standard", P, f64([0, 0.5, 0.5], [1, 0, 0]), IDS, HALF, "drafted at slot 0"),
        ("block", P, f64([1, 0, 0], [0, 0.5, 0.5]), IDS, HALF, "drafted at slot 1"),
        ("block", P, None, IDS, HALF, "probabilistic draft"),
        ("greedy", P, None, IDS, HALF, "one-hot"),
    ],
)
def test_bad_input_is_refused(
    rule: Rule, p: Tensor, q: Tensor | None, ids: Tensor, u: Tensor, message: str
) -> None:
    with pytest.raises(DecodingError, match=message):
        decide(rule, p, q, ids, u)


def test_greedy_shapes_are_checked() -> None:
    with pytest.raises(DecodingError, match="target_argmax"):
        decide_greedy(torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(DecodingError, match="int64"):
        decide_greedy(torch.tensor([1.0, 2.0]), torch.tensor([1]))
