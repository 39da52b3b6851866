"""The qwen3 flavour in recipes: what follows the target, what is refused, what ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_architecture import QWEN3_4B, QWEN3_SAID

from dspark.config.architecture import Qwen3DraftConfig
from dspark.config.load import load_recipe
from dspark.config.resolve import differences, draft_config
from dspark.config.target import TargetShape, check_shape
from dspark.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"
# Qwen/Qwen3-4B, the fields that decide a draft.
TARGET: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40_960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
}


def test_the_recipe_makes_the_published_draft() -> None:
    recipe = load_recipe(RECIPES / "qwen3-4b.yaml")
    sizes = recipe.target.sizes
    assert sizes is not None
    check_shape(sizes, TargetShape.from_hf(TARGET))
    config = draft_config(recipe.draft, sizes.within(recipe.target.max_context))
    written = config.to_json()
    assert {key: written[key] for key in QWEN3_4B} == QWEN3_4B
    published = Qwen3DraftConfig.from_json(QWEN3_4B | QWEN3_SAID)
    assert differences(config, published) == []
    assert config == published


def test_sizes_of_the_other_flavour_are_refused_not_ignored() -> None:
    for recipe, override in (
        ("quickstart.yaml", "draft.head_dim=64"),
        ("quickstart.yaml", "draft.num_key_value_heads=3"),
        ("qwen3-4b.yaml", "draft.kv_lora_rank=512"),
        ("quickstart.yaml", "draft.flavour=qwen3"),
    ):
        with pytest.raises(ConfigError, match="means nothing to a draft of flavour"):
            load_recipe(RECIPES / recipe, [override])
    with pytest.raises(ConfigError, match="flavour"):
        load_recipe(RECIPES / "qwen3-4b.yaml", ["draft.flavour=gemma"])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_key_value_heads": 5}, "draft.num_key_value_heads"),
        ({"head_dim": 65}, "draft.head_dim"),
        ({"num_hidden_layers": 30}, "draft.target_layer_ids"),
    ],
)
def test_a_target_that_the_section_does_not_fit_is_named(changes: dict[str, Any], key: str) -> None:
    recipe = load_recipe(RECIPES / "qwen3-4b.yaml")
    with pytest.raises(ConfigError) as caught:
        draft_config(recipe.draft, TargetShape.from_hf(TARGET | changes))
    assert caught.value.where == key


def test_a_draft_may_be_served_beyond_the_context_it_trained_in() -> None:
    """Engines clamp a draft at its own positions: they are the target's, not the recipe's."""
    whole = TargetShape.from_hf(TARGET)
    recipe = load_recipe(RECIPES / "qwen3-4b.yaml")
    short = whole.within(2048)
    assert short.max_position_embeddings == 2048
    assert draft_config(recipe.draft, short).max_position_embeddings == 40_960
