"""`target.sizes` stands in for the target's files, and never contradicts the target itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import dspark
from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetShape
from dspark.errors import ConfigError

# What tests/tiny_model.py makes.
TINY = TargetShape(
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=24,
    vocab_size=50,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)


def section(tiny_target: Path, **changes: object) -> TargetSection:
    return TargetSection(
        source=str(tiny_target), max_context=256, sizes=TINY.model_copy(update=changes)
    )


def test_true_sizes_load_the_same_target(tiny_target: Path) -> None:
    loaded = load_target(section(tiny_target))
    assert loaded.shape == TINY
    assert (
        loaded.shape == load_target(TargetSection(source=str(tiny_target), max_context=256)).shape
    )


@pytest.mark.parametrize("key", [k for k in TargetShape.model_fields if "parameters" not in k])
def test_a_size_that_is_not_the_targets_is_named(tiny_target: Path, key: str) -> None:
    wrong = getattr(TINY, key) * 2
    with pytest.raises(ConfigError) as caught:
        load_target(section(tiny_target, **{key: wrong}))
    assert caught.value.where == f"target.sizes.{key}"
    assert str(wrong) in caught.value.found


def test_rounded_parameter_counts_are_not_compared(tiny_target: Path) -> None:
    load_target(section(tiny_target, parameters=1_000_000, active_parameters=5))


def test_a_context_limit_shortens_the_draft_too(tiny_target: Path) -> None:
    loaded = load_target(TargetSection(source=str(tiny_target), max_context=64))
    assert loaded.shape == TINY.within(64)
    assert loaded.shape.max_position_embeddings == 64


@pytest.mark.slow
def test_sizes_are_no_reason_to_redo_work(tiny_recipe: Path) -> None:
    small = ["prompts.sources.0.train=16"]
    assert dspark("prompts", str(tiny_recipe), *small).returncode == 0
    told = ["target.sizes={hidden_size: 96, intermediate_size: 192, num_hidden_layers: 4, "
            "num_attention_heads: 4, vocab_size: 50, max_position_embeddings: 256, "
            "rms_norm_eps: 1e-6}"]  # fmt: skip
    again = dspark("prompts", str(tiny_recipe), *small, *told)
    assert "finished before" in again.stdout, again.stdout + again.stderr
    refused = dspark("prompts", str(tiny_recipe), *told, "target.sizes.vocab_size=51")
    assert refused.returncode == 2, refused.stderr
    assert "target.sizes.vocab_size" in refused.stderr
