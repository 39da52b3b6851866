"""Which linears become FP8, and which patterns say so."""

from __future__ import annotations

import re

import pytest

from dspark.checkpoint.layout import meta_draft
from dspark.checkpoint.quantization import is_ignored, linear_names
from dspark.config.architecture import DraftConfig
from dspark.errors import ConfigError
from dspark.quantize.recipe import Choice, check_patterns, choose
from made_drafts import tiny_config, tiny_qwen3

PHASE1 = (
    r"re:.*context_proj$",
    r"re:.*context_kv_proj$",
    r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)$",
    r"re:.*markov_head.*",
    r"re:.*confidence_head.*",
    r"re:.*embed_tokens$",
    r"re:.*lm_head$",
)


def chosen(config: DraftConfig, recipe: str = "phase1", **patterns: list[str]) -> Choice:
    linears = linear_names(meta_draft(config))
    choice = choose(config.flavour, config.num_hidden_layers, linears, recipe, **patterns)
    check_patterns(choice, linears)
    return choice


def test_phase_one_is_thirty_tensors_in_twenty_five_modules_of_five_layers() -> None:
    choice = chosen(tiny_config(num_hidden_layers=5))
    assert choice.ignore == PHASE1
    of_layer = ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert set(choice.linears) == {f"layers.{i}.{n}" for i in range(5) for n in of_layer}
    assert len(choice.modules) == 25
    assert choice.modules["layers.3.mlp.gate_up_proj"] == (
        "layers.3.mlp.gate_proj",
        "layers.3.mlp.up_proj",
    )
    assert sorted(n for own in choice.modules.values() for n in own) == sorted(choice.linears)
    assert all(choice.exclusions.values())


def test_the_qwen3_flavour_adds_one_pattern_and_joins_q_k_v() -> None:
    choice = chosen(tiny_qwen3(num_hidden_layers=3))
    assert choice.ignore == (*PHASE1, r"re:.*\.fc$")
    assert len(choice.linears) == 21
    assert len(choice.modules) == 12
    assert choice.modules["layers.0.self_attn.qkv_proj"] == tuple(
        f"layers.0.self_attn.{p}_proj" for p in "qkv"
    )


def test_phase_two_adds_the_context_path_with_the_rows_of_all_layers_joined() -> None:
    choice = chosen(tiny_config(num_hidden_layers=3), "phase2")
    assert choice.ignore == PHASE1[3:]
    assert len(choice.linears) == 3 * 8 + 1
    assert choice.modules["context_proj"] == ("context_proj",)
    assert choice.modules["layers.1.self_attn.fused_qkv_a_proj"] == (
        "layers.1.self_attn.q_a_proj",
        "layers.1.self_attn.kv_a_proj_with_mqa",
    )
    assert choice.modules["context_kv_proj"] == tuple(
        f"layers.{i}.self_attn.kv_a_proj_with_mqa" for i in range(3)
    )
    assert "fc" in chosen(tiny_qwen3(), "phase2").linears


def test_patterns_of_ones_own_add_and_remove_whole_groups() -> None:
    config = tiny_config()
    added = chosen(config, include=["*q_a_proj", "*kv_a_proj_with_mqa"])
    assert added.ignore == (PHASE1[0], *PHASE1[3:])
    less = chosen(config, exclude=["layers.*.mlp.*"])
    assert not any("mlp" in name for name in less.linears)
    assert r"re:.*mlp\.(gate_proj|up_proj|gate_up_proj)$" in less.ignore
    for runtime in ("model.layers.93.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"):
        assert is_ignored(runtime, less.ignore)
    both = chosen(config, "phase2", include=["context_proj"], exclude=["context_proj"])
    assert "context_proj" not in both.linears


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ({"include": ["*q_a_proj"]}, "kv_a_proj_with_mqa in float"),
        ({"exclude": ["*up_proj"]}, "gate_proj in FP8"),
        ({"exclude": ["layers.0.mlp.down_proj"]}, "layers.0.mlp.down_proj in float"),
        ({"include": ["layers.0.self_attn.q_a_proj", "layers.0.self_attn.kv_a_proj_with_mqa"]}, "layers.1"),
        ({"include": ["markov_head.*"]}, "markov_head.markov_w2"),
        ({"include": ["*"]}, "head"),
        ({"include": ["layers.*.mlp.gate"]}, "layers.*.mlp.gate"),
        ({"exclude": ["*"]}, "none"),
    ],
)  # fmt: skip
def test_modules_torn_apart_heads_and_idle_patterns_are_refused(
    patterns: dict[str, list[str]], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(tiny_config(), **patterns)
    assert says in caught.value.found


def test_an_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="phase1, phase2"):
        chosen(tiny_config(), "phase3")


# What an engine calls the modules of a five-layer K3 draft, before its layer number.
FUSED = ("self_attn.fused_qkv_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj",
         "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")  # fmt: skip
OTHERS = ("model.context_proj", "model.context_kv_proj", "model.markov_head.markov_w1",
          "model.markov_head.markov_w2", "model.confidence_head.proj", "model.embed_tokens",
          "lm_head")  # fmt: skip


@pytest.mark.parametrize("first", [93, 0])
def test_patterns_leave_the_twenty_five_modules_under_both_engines_numbers(first: int) -> None:
    modules = [f"model.layers.{first + i}.{n}" for i in range(5) for n in FUSED] + list(OTHERS)
    left = [name for name in modules if not is_ignored(name, PHASE1)]
    assert left == [f"model.layers.{first + i}.{n}" for i in range(5) for n in FUSED[1:]]
    needed = {pattern: [n for n in modules if re.match(pattern[3:], n)] for pattern in PHASE1}
    for pattern, named in needed.items():
        others = [p for p in PHASE1 if p != pattern]
        assert named, pattern
        assert not any(is_ignored(name, others) for name in named), pattern
