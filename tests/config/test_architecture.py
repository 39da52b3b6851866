"""Draft sizes: what config.json may hold, and that it survives the round trip unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dspark.checkpoint.published import check_fields
from dspark.config.architecture import (
    DraftConfig,
    K3DraftConfig,
    Qwen3DraftConfig,
    RopeParameters,
)
from dspark.config.load import parse_draft_config, read_json_object
from dspark.errors import ConfigError

KIMI_K3: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163_840,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50_000,
        "factor": 64,
        "original_max_position_embeddings": 4096,
    },
    "target_layer_ids": [2, 23, 47, 71, 89],
    "target_num_hidden_layers": 93,
    "target_hidden_size": 7168,
    "mask_token_id": 163_838,
    "sample_from_anchor": True,
}


# The published draft for Qwen/Qwen3-4B: a Qwen3 config with the draft's fields beside it.
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151_669,
    "max_position_embeddings": 40_960,
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
# What DeepSpec leaves to its reader and we always write.
QWEN3_SAID: dict[str, Any] = {
    "sample_from_anchor": True,
    "target_hidden_size": 2560,
    "target_num_hidden_layers": 36,
}


def load_draft_config(path: Path) -> DraftConfig:
    path = path / "config.json" if path.is_dir() else path
    return parse_draft_config(read_json_object(path, "a config.json"), str(path))


def write_config(tmp_path: Path, **changes: Any) -> Path:
    raw = K3DraftConfig.from_json(KIMI_K3).to_json() | changes
    return write_json(tmp_path, raw)


def write_json(tmp_path: Path, raw: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def test_kimi_k3_sizes_are_accepted_and_give_rows_of_576(tmp_path: Path) -> None:
    config = load_draft_config(write_config(tmp_path))
    assert config.row_width == 576
    assert config.target_layer_ids == (2, 23, 47, 71, 89)
    raw = config.to_json()
    assert raw["num_target_layers"] == 5
    assert raw["num_key_value_heads"] == 64
    assert raw["draft_vocab_size"] == 163_840
    assert load_draft_config(tmp_path) == config


def test_the_published_qwen3_config_is_accepted_and_written_back_key_by_key(
    tmp_path: Path,
) -> None:
    config = load_draft_config(write_json(tmp_path, QWEN3_4B | QWEN3_SAID))
    assert isinstance(config, Qwen3DraftConfig)
    assert config.row_width == 2 * 8 * 128
    assert config.rope_parameters == RopeParameters(rope_theta=1e6)
    written = config.to_json()
    assert {key: written[key] for key in QWEN3_4B} == QWEN3_4B
    extra = {"rope_theta", "draft_vocab_size", *QWEN3_SAID}
    assert set(written) - set(QWEN3_4B) == extra


def test_the_older_spelling_of_rope_is_read_and_a_contradiction_refused(tmp_path: Path) -> None:
    raw = {k: v for k, v in (QWEN3_4B | QWEN3_SAID).items() if k != "rope_parameters"}
    older = raw | {"rope_theta": 1_000_000, "rope_scaling": None}
    assert load_draft_config(write_json(tmp_path, older)).rope_parameters.rope_theta == 1e6
    both = QWEN3_4B | QWEN3_SAID | {"rope_theta": 10_000.0}
    with pytest.raises(ConfigError, match="rope_theta"):
        load_draft_config(write_json(tmp_path, both))


@st.composite
def draft_configs(draw: st.DrawFn) -> DraftConfig:
    size = st.integers(1, 1 << 20)
    depth = draw(st.integers(2, 200))
    ids = draw(st.sets(st.integers(0, depth - 2), min_size=1, max_size=8))
    vocabulary, hidden = draw(size), draw(size)
    rope = RopeParameters(rope_theta=draw(st.floats(1, 1e7)))
    qwen3 = draw(st.booleans())
    if draw(st.booleans()):
        rope = RopeParameters(
            rope_type="yarn",
            rope_theta=rope.rope_theta,
            factor=draw(st.floats(1, 128)),
            original_max_position_embeddings=draw(size),
            mscale_all_dim=0.0 if qwen3 else draw(st.floats(0, 2)),
        )
    shared: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": draw(size),
        "num_hidden_layers": draw(st.integers(1, 100)),
        "rms_norm_eps": draw(st.floats(1e-12, 1e-2)),
        "vocab_size": vocabulary,
        "max_position_embeddings": draw(size),
        "rope_parameters": rope,
        "target_layer_ids": tuple(sorted(ids)),
        "target_num_hidden_layers": depth,
        "target_hidden_size": hidden,
        "mask_token_id": draw(st.integers(0, vocabulary - 1)),
        "markov_rank": draw(size),
        "markov_head_type": draw(st.sampled_from(["vanilla", "gated", "rnn"])),
        "block_size": draw(st.integers(1, 64)),
    }
    if qwen3:
        groups = draw(size)
        return Qwen3DraftConfig(
            **shared,
            num_attention_heads=groups * draw(st.integers(1, 16)),
            num_key_value_heads=groups,
            head_dim=2 * draw(size),
        )
    return K3DraftConfig(
        **shared,
        num_attention_heads=draw(size),
        q_lora_rank=draw(size),
        kv_lora_rank=draw(size),
        qk_nope_head_dim=draw(size),
        qk_rope_head_dim=2 * draw(size),
        v_head_dim=draw(size),
    )


@settings(max_examples=100, deadline=None)
@given(draft_configs())
def test_every_draft_config_survives_config_json(config: DraftConfig) -> None:
    raw = json.loads(json.dumps(config.to_json()))
    check_fields(raw, "what we write passes our own strict reader")
    assert DraftConfig.from_json(raw) == config


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"hidden_size": 0}, "hidden_size", "0 (must be greater than 0)"),
        ({"num_hidden_layers": -5}, "num_hidden_layers", "-5 (must be greater than 0)"),
        ({"vocab_size": "163840"}, "vocab_size", "'163840' (must be a valid integer)"),
        ({"kv_lora_rank": True}, "kv_lora_rank", "True (must be a valid integer)"),
        ({"block_size": 65}, "block_size", "65 (must be less than or equal to 64)"),
        ({"markov_head_type": "lstm"}, "markov_head_type", "'lstm'"),
        ({"sample_from_anchor": False}, "sample_from_anchor", "False (must be True)"),
        ({"target_layer_ids": [2, 23, 23]}, "target_layer_ids", "strictly increasing"),
        ({"target_layer_ids": [23, 2]}, "target_layer_ids", "strictly increasing"),
        ({"target_layer_ids": [2, 92]}, "target_layer_ids", "layer id 92 is the last of 93"),
        ({"target_layer_ids": [2, 93]}, "target_layer_ids", "93 is outside [0, 91]"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids", "-1 is negative"),
        ({"target_layer_ids": []}, "target_layer_ids", "at least one"),
        ({"target_layer_ids": ["2"]}, "target_layer_ids.0", "'2' (must be a valid integer)"),
        ({"mask_token_id": 163_840}, "mask_token_id", "outside the vocabulary of 163840"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim", "must be even"),
        ({"target_hidden_size": 4096}, "hidden_size", "must equal the target's 4096"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters", "yarn needs"),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters", "factor is only meaningful"),
        ({"draft_vocab_size": 32_000}, "draft_vocab_size", "draft_vocab_size is 32000"),
        ({"num_target_layers": 93}, "num_target_layers", "num_target_layers is 93"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "tie_word_embeddings is True"),
    ],
)
def test_sizes_that_make_no_draft_are_refused_with_their_key(
    tmp_path: Path, changes: dict[str, Any], key: str, found: str
) -> None:
    path = write_config(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_draft_config(path)
    assert caught.value.where.startswith(f"{path}: {key}")
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"head_dim": 127}, "head_dim", "must be even"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "must divide the 32 query heads"),
        ({"num_target_layers": 40}, "num_target_layers", "num_target_layers is 40"),
        ({"attention_bias": True}, "attention_bias", "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window", "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types", "sliding_attention"),
        ({"enable_confidence_head": False}, "enable_confidence_head", "is False"),
        ({"draft_vocab_size": 32_000}, "draft_vocab_size", "draft_vocab_size is 32000"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, "rope_type", "'linear'"),
        ({"rope_parameters": 3}, "rope_parameters", "3"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": 1,
                                 "mscale_all_dim": 1}},
            "rope_parameters",
            "plain YaRN",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", "K3DSparkModel"),
        ({"architectures": ["K3DSparkModel"]}, "q_lora_rank", "missing"),
    ],
)  # fmt: skip
def test_qwen3_sizes_that_make_no_draft_are_refused_with_their_key(
    tmp_path: Path, changes: dict[str, Any], key: str, found: str
) -> None:
    path = write_json(tmp_path, QWEN3_4B | QWEN3_SAID | changes)
    with pytest.raises(ConfigError) as caught:
        load_draft_config(path)
    assert caught.value.where.startswith(f"{path}: {key}")
    assert found in caught.value.found


@pytest.mark.parametrize("key", ["sample_from_anchor", "mask_token_id", "target_layer_ids"])
def test_a_convention_that_is_not_written_is_never_assumed(tmp_path: Path, key: str) -> None:
    path = write_config(tmp_path)
    raw = json.loads(path.read_text())
    del raw[key]
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_draft_config(path)
    assert key in caught.value.found
    assert "missing" in caught.value.found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value"),
        ("[]", "a list instead of an object"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": NaN}', "NaN"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_files_that_are_no_config_json_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_draft_config(path)
    assert caught.value.where == str(path)
    assert found in caught.value.found


def test_a_missing_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_draft_config(tmp_path)


def test_values_never_change_after_validation() -> None:
    config = K3DraftConfig.from_json(KIMI_K3)
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 3
