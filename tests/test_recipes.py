"""Every recipe we ship can be read, and the Kimi-K3 recipe makes the published draft exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import dspark, dspark_each
from dspark.checkpoint.layout import parameters, parts, tensor_shapes, trainable_parameters
from dspark.config.architecture import DraftConfig
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
KIMI_K3 = next(path for path in RECIPES if path.name == "kimi-k3.yaml")

# docs/contract.md, section 3, written out by hand: H 7168, L 5, V 163840, r 256, MLP 14336,
# 64 heads, q_lora 1536, kv_lora 512, nope 128, rope 64, v 128.
LAYER = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (64 * (128 + 64), 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (512 + 64, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (64 * (128 + 128), 512),
    "self_attn.o_proj.weight": (7168, 64 * 128),
    "mlp.gate_proj.weight": (14336, 7168),
    "mlp.up_proj.weight": (14336, 7168),
    "mlp.down_proj.weight": (7168, 14336),
}
PUBLISHED = {
    "context_proj.weight": (7168, 5 * 7168),
    "context_norm.weight": (7168,),
    "final_norm.weight": (7168,),
    "embed_tokens.weight": (163_840, 7168),
    "markov_head.markov_w1.weight": (163_840, 256),
    "markov_head.markov_w2.weight": (163_840, 256),
    "confidence_head.proj.weight": (1, 7168 + 256),
    "confidence_head.proj.bias": (1,),
    **{f"layers.{i}.{name}": shape for i in range(5) for name, shape in LAYER.items()},
}


def kimi_k3() -> DraftConfig:
    recipe = load_recipe(KIMI_K3)
    assert recipe.target.sizes is not None
    return draft_config(recipe.draft, recipe.target.sizes)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.output == f"runs/{path.stem}"


def test_the_kimi_k3_draft_has_exactly_the_published_tensors() -> None:
    shapes = tensor_shapes(kimi_k3())
    assert shapes == PUBLISHED
    assert len(shapes) == 68
    assert parameters(shapes) == 3_562_312_961
    assert trainable_parameters(shapes) == 2_387_907_841
    assert sum(part.parameters for part in parts(shapes)) == 3_562_312_961


def test_the_kimi_k3_draft_has_the_published_conventions() -> None:
    config = kimi_k3()
    assert config.target_layer_ids == (2, 23, 47, 71, 89)
    assert config.target_num_hidden_layers == 93
    assert config.max_position_embeddings == 1_048_576
    assert config.rope_parameters.model_dump() == {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32_768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def test_inspect_of_the_kimi_k3_recipe_needs_no_target(tmp_path: Path) -> None:
    done, page = dspark_each(["inspect", str(KIMI_K3), "--json"], ["inspect", str(KIMI_K3)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tensors"] == 68
    assert found["parameters"] == 3_562_312_961
    assert found["trainable_parameters"] == 2_387_907_841
    assert found["flavour"] == "k3"
    assert found["bytes"] == {"BF16": 7_124_625_922}
    assert found["row_width"] == 576
    assert found["cache_elements_per_token"] == 2880
    assert found["cache_bytes_per_token"] == 5760
    ids = {view["engine"]: view["layer_ids"] for view in found["engines"]}
    assert ids["ATOM"] == [2, 23, 47, 71, 89]
    assert ids["vLLM"] == [3, 24, 48, 72, 90]
    assert page.returncode == 0, page.stderr
    assert "3,562,312,961" in page.stdout


def test_plan_of_the_kimi_k3_recipe_needs_no_target() -> None:
    done = dspark("run", str(KIMI_K3), "--plan")
    assert done.returncode == 0, done.stderr
    assert "7.1 GB" in done.stdout  # the draft
    assert "TB" in done.stdout  # its states: told before, not discovered after
