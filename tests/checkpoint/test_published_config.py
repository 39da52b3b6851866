"""config.json of a draft: nothing is assumed, nothing is read over, every refusal names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.checkpoint.published import PROVENANCE, check_fields, read_config
from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig, RopeParameters
from dspark.errors import CheckpointError
from made_drafts import TARGET, edit_config, saved_draft, tiny_config, tiny_qwen3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_draft(tmp_path)
    return tmp_path


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    return caught.value


def test_what_was_written_is_read_back(folder: Path) -> None:
    config, provenance = read_config(folder)
    assert config == tiny_config()
    assert {key: provenance[key] for key in TARGET} == TARGET
    assert provenance["embedding"]["included"] is True


@pytest.mark.parametrize("key", sorted(K3DraftConfig.model_fields))
def test_a_field_that_decides_the_arithmetic_is_never_assumed(folder: Path, key: str) -> None:
    error = refusal(edit_config(folder, drop=(key,)))
    assert error.where == f"{folder / 'config.json'}: {key}"
    assert "missing" in error.found


@pytest.mark.parametrize("key", sorted(Qwen3DraftConfig.model_fields))
def test_nor_in_a_qwen3_draft(tmp_path: Path, key: str) -> None:
    saved_draft(tmp_path, config=tiny_qwen3())
    assert read_config(tmp_path)[0] == tiny_qwen3()
    # Without num_anchors too: with it and no layout, it is a DeepSpec file and read as one.
    error = refusal(edit_config(tmp_path, drop=(key, "num_anchors")))
    assert error.where.split(": ")[1].startswith(key)
    assert "missing" in error.found


def test_the_fill_in_layout_is_another_model(folder: Path) -> None:
    error = refusal(edit_config(folder, sample_from_anchor=False))
    assert error.where.endswith(": sample_from_anchor")
    assert "trained anew" in error.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_interleave", True),
        ("rope_interleave", False),
        ("dflash_config", {"mask_token_id": 3}),
        ("eagle_aux_hidden_state_layer_ids", [1, 2]),
    ],
)
def test_fields_that_engines_read_in_another_way_must_be_absent(
    folder: Path, key: str, value: Any
) -> None:
    error = refusal(edit_config(folder, **{key: value}))
    assert error.where.endswith(f": {key}")
    assert "Remove it" in error.fix


def test_attention_factor_is_refused_with_its_reason(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    error = refusal(
        edit_config(folder, rope_parameters={**raw["rope_parameters"], "attention_factor": 1.0})
    )
    assert error.where.endswith("rope_parameters.attention_factor")
    assert "mscale_all_dim" in error.fix


@pytest.mark.parametrize("key", sorted(RopeParameters.model_fields))
def test_a_rotation_is_written_out_in_full(folder: Path, key: str) -> None:
    yarn = RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    rope = yarn.model_dump()
    edit_config(folder, rope_parameters=rope)
    assert read_config(folder)[0].rope_parameters == yarn
    del rope[key]
    error = refusal(edit_config(folder, rope_parameters=rope))
    assert error.where.endswith(f"rope_parameters.{key}")


def test_num_target_layers_is_not_the_depth(folder: Path) -> None:
    error = refusal(edit_config(folder, num_target_layers=4))
    assert error.where.endswith(": num_target_layers")
    assert "the target's depth" in error.found
    assert "target_num_hidden_layers" in error.fix
    assert "another number" in refusal(edit_config(folder, num_target_layers=3)).found


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": ["K3DSparkModel", "Other"]}, "architectures"),
        ({"architectures": "K3DSparkModel"}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"sliding_window": 2048}, "sliding_window"),
        ({"attention_bias": 0}, "attention_bias"),
        ({"attention_sink": 4}, "attention_sink"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"dspark_block_size": 8}, "dspark_block_size"),
        ({"mask_token_id": 32}, "mask_token_id"),
        ({PROVENANCE: "somebody"}, PROVENANCE),
    ],
)
def test_what_is_not_this_draft_is_refused(folder: Path, changes: dict[str, Any], key: str) -> None:
    error = refusal(edit_config(folder, **changes))
    assert error.where.startswith(f"{folder / 'config.json'}: {key}")


def test_harmless_fields_of_other_writers_are_read(folder: Path) -> None:
    edit_config(
        folder, bos_token_id=1, eos_token_id=[2], pad_token_id=0, transformers_version="5.19",
        mla_use_nope=False, mla_use_output_gate=False, attention_dropout=0.0, sliding_window=None,
    )  # fmt: skip
    assert read_config(folder)[0] == tiny_config()


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
def test_files_that_are_no_json_object_are_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    error = refusal(tmp_path)
    assert error.where == str(tmp_path / "config.json")
    assert found in error.found


def test_no_config_json_and_no_utf8_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path).found
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "UTF-8" in refusal(tmp_path).found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(c, k) for c in (tiny_config(), tiny_qwen3()) for k in sorted(c.to_json())]),
    JSON,
)
def test_any_value_in_any_field_is_read_or_refused_but_never_crashes(
    place: tuple[DraftConfig, str], value: Any
) -> None:
    sound, key = place
    raw = {**sound.to_json(), key: value}
    try:
        check_fields(raw, "here")
        config = DraftConfig.from_json(raw)
    except (CheckpointError, ValueError):
        return
    if key not in sound.not_ours:
        assert config.to_json()[key] == value
