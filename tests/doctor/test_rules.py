"""The table of engine rules: a published config breaks none, and every rule can be broken."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.config.architecture import K3DraftConfig, Qwen3DraftConfig, RopeParameters
from dspark.doctor.files import check_config, check_recorded, check_trained
from dspark.doctor.rules import ENGINES, RULES, check_rules, layer_id_table

YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip


def k3() -> dict[str, Any]:
    """Kimi-K3's draft, as published."""
    return K3DraftConfig(
        hidden_size=7168, intermediate_size=14336, num_hidden_layers=5, num_attention_heads=64,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, vocab_size=163840, max_position_embeddings=131072,
        rope_parameters=RopeParameters(**YARN), target_layer_ids=(2, 23, 47, 71, 89),
        target_num_hidden_layers=93, target_hidden_size=7168, mask_token_id=163838,
    ).to_json()  # fmt: skip


def qwen3() -> dict[str, Any]:
    """The draft of Qwen3-4B, as published."""
    return Qwen3DraftConfig(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=5, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_parameters=RopeParameters(rope_theta=1e6),
        target_layer_ids=(1, 9, 17, 25, 33), target_num_hidden_layers=36, target_hidden_size=2560,
        mask_token_id=151669,
    ).to_json()  # fmt: skip


def broken(raw: dict[str, Any], engines: tuple[str, ...] = ENGINES) -> set[str]:
    found = [c for c in check_rules(raw, engines) if c.status in {"fail", "warn"}]
    assert all(c.cause and c.mend and c.source for c in found)
    return {c.id.removeprefix("rules.") for c in found}


@pytest.mark.parametrize("raw", [k3(), qwen3()], ids=["k3", "qwen3"])
def test_a_published_config_breaks_no_rule(raw: dict[str, Any]) -> None:
    assert broken(raw) == set()


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {k: v for k, v in {**YARN, **changes}.items() if v is not None}}


K3_FAULTS: dict[str, dict[str, Any]] = {
    "architectures": {"model_type": "deepseek_v4"},
    "sizes": {"kv_lora_rank": None, "model_type": "k3_dspark"},
    "sample_from_anchor": {"sample_from_anchor": False},
    "dspark_bonus_anchor": {"dspark_bonus_anchor": True},
    "rope_interleave": {"rope_interleave": False},
    "rope_parameters": {"rope_parameters": None},
    "rope_scaling": {"rope_scaling": {"type": "yarn", "factor": 64.0}},
    "rope_parameters.attention_factor": rope(attention_factor=1.0),
    "rope_parameters.mscale_all_dim": rope(mscale_all_dim=None),
    "rope_parameters.original_max_position_embeddings": rope(original_max_position_embeddings=None),
    "max_position_embeddings": {"max_position_embeddings": 131073},
    "rope_parameters.factor": rope(rope_type="default"),
    "num_target_layers": {"num_target_layers": 93},
    "num_key_value_heads": {"num_key_value_heads": 8},
    "dspark_target_layer_ids": {"dspark_target_layer_ids": [3, 24, 48, 72, 90]},
    "eagle_aux_hidden_state_layer_ids": {"eagle_aux_hidden_state_layer_ids": [3, 24, 48, 72, 90]},
    "dflash_config": {"dflash_config": {}},
    "eagle_config": {"eagle_config": {}},
    "dspark_noise_token_id": {"dspark_noise_token_id": 0},
    "dspark_markov_rank": {"dspark_markov_rank": 64},
    "markov_head_type": {"markov_head_type": "gated"},
    "enable_confidence_head": {"enable_confidence_head": False},
    "confidence_head_with_markov": {"confidence_head_with_markov": False},
    "dspark_block_size": {"dspark_block_size": 5},
    "draft_vocab_size": {"draft_vocab_size": 32000},
    "layer_types": {"layer_types": ["sliding_attention"] * 5},
    "quantization_config.ignore": {"quantization_config": {"ignore": ["lm_head"]}},
    "tie_word_embeddings": {"tie_word_embeddings": True},
}
QWEN3_FAULTS: dict[str, dict[str, Any]] = {
    "architectures": {"architectures": ["Qwen3DSparkForCausalLM"]},
    "sizes": {"head_dim": None},
    "is_neox_style": {"is_neox_style": False},
    "num_target_layers": {"num_target_layers": 5},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
}
CASES = [(k3, key, change) for key, change in K3_FAULTS.items()]
CASES += [(qwen3, key, change) for key, change in QWEN3_FAULTS.items()]


@pytest.mark.parametrize(
    ("sound", "key", "change"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES]
)
def test_breaking_one_rule_breaks_that_rule_alone(sound, key: str, change: dict[str, Any]) -> None:
    raw = {k: v for k, v in {**sound(), **change}.items() if v is not None}
    assert broken(raw) == {key}


def test_every_rule_has_a_case() -> None:
    for rule in RULES:
        for flavour, cases in (("k3", K3_FAULTS), ("qwen3", QWEN3_FAULTS)):
            if rule.flavours == (flavour,) or (flavour == "k3" and "k3" in rule.flavours):
                assert rule.key in cases


def test_an_engine_is_asked_for_its_own_rules_only() -> None:
    raw = {**k3(), "rope_interleave": True}
    assert broken(raw, ("atom",)) == {"rope_interleave"}
    assert broken(raw, ("vllm",)) == set()


def test_a_config_of_any_shape_is_answered_without_a_crash() -> None:
    """Files come from anywhere: wrong types are findings, not tracebacks."""
    wild: list[Any] = [None, "x", 3, [], {}, [None], {"a": []}, -1, True, 1.5]
    for key in (*k3(), "dspark_provenance", "layer_types"):
        for value in wild:
            raw = {**k3(), key: value}
            check_rules(raw, ENGINES)
            check_config(raw)
            check_trained(raw)
            check_recorded(raw, {"template_hash": "0" * 64})
    for key in ("norm_state", "trained", "template_hash"):
        for value in wild:
            raw = {**k3(), "dspark_provenance": {key: value}}
            check_config(raw)
            check_trained(raw)
            check_recorded(raw, {"template_hash": "0" * 64})
    for value in wild:
        for key in YARN:
            check_rules({**k3(), "rope_parameters": {**YARN, key: value}}, ENGINES)
        check_rules({**k3(), "quantization_config": {"ignore": value}}, ENGINES)
        check_rules({**k3(), "quantization_config": value}, ENGINES)


def test_layer_ids_are_told_as_every_engine_counts_them() -> None:
    table = layer_id_table([2, 23, 47, 71, 89])
    by_key = {row["key"]: row["ids"] for row in table.values()}
    assert by_key["target_layer_ids"] == [2, 23, 47, 71, 89]
    for key in ("aux_hidden_state_layers", "eagle_aux_hidden_state_layer_ids", "hidden_states"):
        assert by_key[key] == [3, 24, 48, 72, 90]
