"""Tapped layers: one conversion each way, and default ids that are always valid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config.layers import (
    CONVENTIONS,
    LayerConvention,
    check_layer_ids,
    default_layer_ids,
    from_convention,
    to_convention,
)

KIMI_K3 = (2, 23, 47, 71, 89)


@pytest.mark.parametrize(
    ("convention", "numbers"),
    [
        ("target_layer_ids", (2, 23, 47, 71, 89)),
        ("hf_hidden_states", (3, 24, 48, 72, 90)),
        ("vllm_aux_hidden_state_layers", (3, 24, 48, 72, 90)),
        ("eagle_aux_hidden_state_layer_ids", (3, 24, 48, 72, 90)),
        ("speculators_aux_hidden_state_layer_ids", (3, 24, 48, 72, 90)),
    ],
)
def test_kimi_k3_layers_in_the_numbers_of_every_tool(
    convention: LayerConvention, numbers: tuple[int, ...]
) -> None:
    assert to_convention(KIMI_K3, convention) == numbers
    assert from_convention(numbers, convention) == KIMI_K3


@given(st.sampled_from(CONVENTIONS), st.lists(st.integers(0, 500)).map(tuple))
def test_there_and_back_is_the_same(convention: LayerConvention, ids: tuple[int, ...]) -> None:
    assert from_convention(to_convention(ids, convention), convention) == ids


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_embeddings_output_is_no_layer(convention: LayerConvention) -> None:
    lowest = to_convention((0,), convention)[0]
    with pytest.raises(ValueError, match="embedding"):
        from_convention((lowest - 1,), convention)


def test_default_layer_ids_are_spread_from_1_to_n_minus_3() -> None:
    ids = default_layer_ids(93)
    assert len(ids) == 5
    assert (ids[0], ids[-1]) == (1, 90)
    assert all(20 <= b - a <= 24 for a, b in itertools.pairwise(ids))


@pytest.mark.parametrize("depth", range(2, 12))
def test_default_layer_ids_are_valid_for_shallow_targets(depth: int) -> None:
    check_layer_ids(default_layer_ids(depth), depth)
