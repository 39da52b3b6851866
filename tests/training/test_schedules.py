"""Learning rate and loss coefficients are functions of the step, so a resume cannot lose them."""

from __future__ import annotations

import pytest
from tiny_models import tiny_draft, tiny_section

from dspark.config.recipe import LossSection
from dspark.training.optim import build_optimizer, coefficients, learning_rate


def test_warm_up_is_linear_and_the_cosine_ends_at_zero() -> None:
    section = tiny_section(learning_rate=1.0, warmup_ratio=0.1)
    rates = [learning_rate(section, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-3
    assert learning_rate(section, 100, 100) == pytest.approx(0)


def test_coefficients_are_the_recipes_from_the_start_by_default() -> None:
    assert coefficients(LossSection(), 0, 10) == (0.1, 0.9, 1.0)


def test_ce_first_moves_linearly_to_the_recipes_values() -> None:
    loss = LossSection(ce_first=0.5)
    assert coefficients(loss, 0, 20) == (1.0, 0.0, 1.0)
    assert coefficients(loss, 5, 20) == pytest.approx((0.55, 0.45, 1.0))
    for step in (10, 19):
        assert coefficients(loss, step, 20) == pytest.approx((0.1, 0.9, 1.0))


def test_the_frozen_embedding_never_enters_the_optimiser() -> None:
    draft = tiny_draft()
    optimizer = build_optimizer(draft, tiny_section())
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(draft.embed_tokens.weight) not in inside
    assert inside == {id(p) for p in draft.parameters() if p.requires_grad}
