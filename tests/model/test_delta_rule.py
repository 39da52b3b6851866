"""The block form of the gated delta rule against the rule itself, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.model.delta import l2_normalised, solve, solve_block, state_after


def naive(q, k, v, g, b, state):
    """(outs, states): the four lines of the rule, float64; states[c] is behind c tokens."""
    q, k, v, g, b, state = (x.double() for x in (q, k, v, g, b, state))
    outs, states = [], [state]
    for i in range(k.shape[2]):
        state = state * g[:, :, i].exp().unsqueeze(-1)
        seen = (state * k[:, :, i].unsqueeze(-1)).sum(-2)
        delta = (v[:, :, i] - seen) * b[:, :, i].unsqueeze(-1)
        state = state + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append((state * q[:, :, i].unsqueeze(-1)).sum(-2))
        states.append(state)
    return torch.stack(outs, 2), states


def made(length: int, strength: float, seed: int, batch: int = 2) -> tuple[Tensor, ...]:
    """q, k, v, g, b, state; decays up to ``strength`` a token."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 3, length, 6, generator=generator) for _ in range(3))
    g = -strength * torch.rand(batch, 3, length, 6, generator=generator)
    b = torch.rand(batch, 3, length, generator=generator)
    state = torch.randn(batch, 3, 6, 6, generator=generator)
    return l2_normalised(q), l2_normalised(k), v, g, b, state


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(found).all()
    assert float((found - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 40),
    block=st.integers(1, 16),
    strength=st.sampled_from([0.0, 0.1, 2.0, 60.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_blocks_equal_the_rule_token_by_token(length, block, strength, seed) -> None:
    single = made(length, strength, seed)
    outs, states = naive(*single)
    # Decays summed to thousands leave float32 few digits for their differences.
    exact = [([x.double() for x in single], 1e-10)]
    for parts, tolerance in [*exact, (single, 1e-5)] if strength <= 2 else exact:
        out, start, updates = solve(*parts, block=block)
        close(out, outs, tolerance)
        held = updates.key.shape[2]
        assert held == min(length, block)
        close(start, states[length - held], tolerance)
        close(state_after(start, updates, None), states[-1], tolerance)


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 9),
    strength=st.sampled_from([0.0, 0.5, 40.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_every_prefix_of_a_block_gives_its_own_state(length, strength, seed, data) -> None:
    parts = made(length, strength, seed)
    _, states = naive(*parts)
    _, updates = solve_block(*parts)
    counts = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))
    found = state_after(parts[-1], updates, torch.tensor(counts))
    for row, count in enumerate(counts):
        close(found[row], states[count][row])
        if count == 0:
            assert torch.equal(found[row], parts[-1][row])


def test_all_tokens_by_count_and_by_default_are_the_same_bits() -> None:
    parts = made(8, 1.0, 3)
    _, updates = solve_block(*parts)
    whole = state_after(parts[-1], updates, None)
    assert torch.equal(whole, state_after(parts[-1], updates, torch.tensor([8, 8])))


@pytest.mark.parametrize("pad", [1, 5])
def test_quiet_tokens_in_front_change_nothing(pad: int) -> None:
    q, k, v, g, b, state = made(6, 1.0, 4)
    noisy = made(6 + pad, 1.0, 5)
    padded = [
        torch.cat([n[:, :, :pad], x], 2) for n, x in zip(noisy, (q, k, v, g, b), strict=False)
    ]
    padded[3][:, :, :pad] = 0
    padded[4][:, :, :pad] = 0
    out, updates = solve_block(*padded, state)
    want, plain = solve_block(q, k, v, g, b, state)
    close(out[:, :, pad:], want)
    close(state_after(state, updates, None), state_after(state, plain, None))
