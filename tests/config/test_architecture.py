"""Draft sizes: what config.json may hold, and that it survives the round trip unchanged."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dspark.config.architecture import DraftConfig, RopeParameters, default_layer_ids
from dspark.config.load import load_draft_config
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


def write_config(tmp_path: Path, **changes: Any) -> Path:
    raw = DraftConfig.from_json(KIMI_K3).to_json() | changes
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


@st.composite
def draft_configs(draw: st.DrawFn) -> DraftConfig:
    size = st.integers(1, 1 << 20)
    depth = draw(st.integers(2, 200))
    ids = draw(st.sets(st.integers(0, depth - 2), min_size=1, max_size=8))
    vocabulary, hidden = draw(size), draw(size)
    rope = RopeParameters(rope_theta=draw(st.floats(1, 1e7)))
    if draw(st.booleans()):
        rope = RopeParameters(
            rope_type="yarn",
            factor=draw(st.floats(1, 128)),
            original_max_position_embeddings=draw(size),
            mscale_all_dim=draw(st.floats(0, 2)),
        )
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=draw(size),
        num_hidden_layers=draw(size),
        num_attention_heads=draw(size),
        q_lora_rank=draw(size),
        kv_lora_rank=draw(size),
        qk_nope_head_dim=draw(size),
        qk_rope_head_dim=2 * draw(size),
        v_head_dim=draw(size),
        rms_norm_eps=draw(st.floats(1e-12, 1e-2)),
        vocab_size=vocabulary,
        max_position_embeddings=draw(size),
        rope_parameters=rope,
        target_layer_ids=tuple(sorted(ids)),
        target_num_hidden_layers=depth,
        target_hidden_size=hidden,
        mask_token_id=draw(st.integers(0, vocabulary - 1)),
        markov_rank=draw(size),
        markov_head_type=draw(st.sampled_from(["vanilla", "gated", "rnn"])),
        block_size=draw(st.integers(1, 64)),
    )


@settings(max_examples=100, deadline=None)
@given(draft_configs())
def test_every_draft_config_survives_config_json(config: DraftConfig) -> None:
    assert DraftConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


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


def test_default_layer_ids_are_spread_from_1_to_n_minus_3() -> None:
    ids = default_layer_ids(93)
    assert len(ids) == 5
    assert (ids[0], ids[-1]) == (1, 90)
    assert all(20 <= b - a <= 24 for a, b in itertools.pairwise(ids))


@pytest.mark.parametrize("depth", range(2, 12))
def test_default_layer_ids_are_valid_for_shallow_targets(depth: int) -> None:
    raw = KIMI_K3 | {
        "target_num_hidden_layers": depth,
        "target_layer_ids": default_layer_ids(depth),
    }
    assert DraftConfig.from_json(raw).target_layer_ids


def test_values_never_change_after_validation() -> None:
    config = DraftConfig.from_json(KIMI_K3)
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 3
