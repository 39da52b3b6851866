"""Loading a draft: bit-exact, or refused with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.checkpoint.draft import (
    TARGET_NOTE,
    check_notes,
    load_draft,
    save_draft,
    verify_weights,
)
from dspark.checkpoint.layout import EMBEDDING
from dspark.checkpoint.published import PROVENANCE, read_config
from dspark.checkpoint.shards import INDEX, WEIGHTS, open_weights
from dspark.checkpoint.tensors import digest_of
from dspark.config.architecture import DraftConfig
from dspark.errors import CheckpointError
from made_drafts import TARGET, edit_config, saved_draft, tiny_config, tiny_draft, tiny_qwen3


def refusal(folder: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, **options)
    return caught.value


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Edit the tensors of a saved draft with the library."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("make", [tiny_config, tiny_qwen3])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draft_survives_the_round_trip_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, kind: str, make: Callable[..., DraftConfig]
) -> None:
    draft = saved_draft(tmp_path, dtype, make(markov_head_type=kind))
    loaded, provenance = load_draft(tmp_path, dtype=dtype)
    assert loaded.config == draft.config
    assert TARGET.items() <= provenance.items()
    state = loaded.state_dict()
    for name, tensor in draft.state_dict().items():
        assert state[name].dtype == dtype
        assert state[name].equal(tensor), name
    save_draft(tmp_path, loaded, TARGET, dtype)
    again, _ = load_draft(tmp_path, dtype=dtype)
    assert all(again.state_dict()[n].equal(t) for n, t in state.items())


def test_a_loaded_draft_computes_what_the_saved_one_did(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path)
    loaded, _ = load_draft(tmp_path)
    taps = torch.randn(1, 5, 2, 16)
    position = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        for one, two in zip(
            draft.context_rows(draft.context(taps), position),
            loaded.context_rows(loaded.context(taps), position),
            strict=True,
        ):
            assert one.equal(two)
    assert not loaded.embed_tokens.weight.requires_grad
    assert loaded.context_proj.weight.requires_grad


NORM = "context_norm.weight"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda t: t.pop(NORM), f"missing {NORM}"),
        (lambda t: t.pop(EMBEDDING), f"missing {EMBEDDING}"),
        (lambda t: t.update({"lm_head.weight": torch.ones(32, 16)}), "unexpected lm_head.weight"),
        (lambda t: t.update({NORM: torch.ones(17)}), "shape (17,), config implies (16,)"),
        (lambda t: t.update({NORM: torch.ones(1, 16)}), "shape (1, 16)"),
        (lambda t: t.update({NORM: torch.ones(16, dtype=torch.int8)}), "dtype I8, config implies F32"),
        (lambda t: t.update({NORM: torch.ones(16).to(torch.float8_e4m3fn)}), "dtype F8_E4M3, config implies F32"),
        (lambda t: t[NORM].__setitem__(3, float("nan")), f"{NORM} holds NaN or infinity"),
        (lambda t: t[NORM].__setitem__(3, float("inf")), f"{NORM} holds NaN or infinity"),
        (lambda t: t[NORM].__setitem__(3, float("-inf")), f"{NORM} holds NaN or infinity"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_this_draft_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], found: str
) -> None:
    saved_draft(tmp_path)
    error = refusal(change(tmp_path, edit))
    assert found in error.found
    assert error.where == str(tmp_path / WEIGHTS)


def test_a_quantized_weight_is_not_taken_for_numbers(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    name = "layers.0.mlp.gate_proj.weight"

    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(24, 1)

    error = refusal(change(tmp_path, quantize))
    assert f"unexpected {name}_scale" in error.found
    assert f"{name} has dtype F8_E4M3, config implies F32" in error.found


def test_three_faults_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    error = refusal(change(tmp_path, lambda t: [t.pop(n) for n in list(t)[:5]]))
    assert error.found.count("missing") == 3
    assert error.found.endswith("and 2 more")


def test_config_and_weights_of_two_drafts_are_refused(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    assert "shape" in refusal(edit_config(tmp_path, intermediate_size=25)).found
    edit_config(tmp_path, intermediate_size=24, num_hidden_layers=3)
    assert "missing layers.2" in refusal(tmp_path).found


def test_weights_that_are_absent_or_damaged_are_refused(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    path = tmp_path / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert "truncated" in refusal(tmp_path).found
    path.unlink()
    assert "no such file" in refusal(tmp_path).found
    path.mkdir()
    assert "something else" in refusal(tmp_path).found


def test_every_number_is_read_by_verification(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path)
    counts: list[int] = []
    _, provenance = read_config(tmp_path)
    verify_weights(open_weights(tmp_path), provenance, counts.append)
    assert sum(counts) == sum(t.numel() * 4 for t in draft.state_dict().values())
    change(tmp_path, lambda t: t[EMBEDDING][31].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} holds NaN"):
        verify_weights(open_weights(tmp_path), {})


def test_weights_changed_after_they_were_made_are_found(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    _, provenance = read_config(tmp_path)
    change(tmp_path, lambda t: t[NORM].add_(1e-3))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} with sha256"):
        verify_weights(open_weights(tmp_path), provenance)
    change(tmp_path, lambda t: t[EMBEDDING].add_(1e-3))
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} with sha256"):
        verify_weights(open_weights(tmp_path), provenance)


def test_an_embedding_that_is_not_the_targets_is_told_from_the_hashes(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    _, provenance = read_config(tmp_path)
    check_notes(provenance, "here")
    check_notes({**provenance, TARGET_NOTE: provenance["embedding"]["sha256"]}, "here")
    with pytest.raises(CheckpointError, match="the target's embedding"):
        check_notes({**provenance, TARGET_NOTE: 64 * "0"}, "here")


# --- the target's embedding ----------------------------------------------------------------------


def slim(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Save a draft, take its embedding out and say so; returns the embedding."""
    embedding = saved_draft(folder, dtype).embed_tokens.weight.detach()
    change(folder, lambda t: t.pop(EMBEDDING))
    note = {"included": False, **digest_of(embedding)}
    edit_config(folder, **{PROVENANCE: {**TARGET, "embedding": note}})
    return embedding


def test_an_embedding_of_another_target_is_refused(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path)
    own = draft.embed_tokens.weight.detach()
    load_draft(tmp_path, embedding=own)
    other = own.clone()
    other[7, 3] += 1e-6
    assert "another embed_tokens" in refusal(tmp_path, embedding=other).found
    assert "another embed_tokens" in refusal(tmp_path, embedding=own[:31]).found


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_an_embedding_is_compared_at_the_narrower_precision(
    tmp_path: Path, narrow: torch.dtype
) -> None:
    """An fp32 draft of a target loaded in bf16, and the other way round."""
    own = saved_draft(tmp_path).embed_tokens.weight.detach()
    load_draft(tmp_path, embedding=own.to(narrow))
    saved_draft(tmp_path, narrow)
    load_draft(tmp_path, embedding=own)
    assert "another" in refusal(tmp_path, embedding=own * 1.1).found


def test_a_slim_draft_takes_the_targets_embedding(tmp_path: Path) -> None:
    embedding = slim(tmp_path)
    loaded, _ = load_draft(tmp_path, embedding=embedding)
    assert loaded.embed_tokens.weight.equal(embedding)
    error = refusal(tmp_path)
    assert "no target" in error.found
    assert "--slim" in error.fix
    assert "another target" in refusal(tmp_path, embedding=embedding + 1).found
    assert "shape (31, 16)" in refusal(tmp_path, embedding=embedding[:31]).found


def test_a_slim_draft_in_bf16_takes_an_fp32_target(tmp_path: Path) -> None:
    slim(tmp_path, torch.bfloat16)
    wide = tiny_draft().embed_tokens.weight.detach()
    loaded, _ = load_draft(tmp_path, embedding=wide)
    assert loaded.embed_tokens.weight.equal(wide.to(torch.bfloat16).float())


def test_a_draft_that_calls_itself_slim_must_be(tmp_path: Path) -> None:
    embedding = slim(tmp_path)
    change(tmp_path, lambda t: t.update({EMBEDDING: embedding.clone()}))
    assert f"unexpected {EMBEDDING}" in refusal(tmp_path, embedding=embedding).found


# --- several files -------------------------------------------------------------------------------


def split(folder: Path) -> dict[str, str]:
    """Spread a saved draft over two files with an index; returns the weight map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    mapped: dict[str, str] = {}
    for number, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        mapped |= dict.fromkeys(part, file)
    write_index(folder, mapped)
    return mapped


def write_index(folder: Path, mapped: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path)
    split(tmp_path)
    loaded, _ = load_draft(tmp_path)
    assert all(loaded.state_dict()[n].equal(t) for n, t in draft.state_dict().items())


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    saved_draft(tmp_path)
    mapped = split(tmp_path)
    first, second = sorted(set(mapped.values()))
    for wrong, says in (
        ({**mapped, NORM: second if mapped[NORM] == first else first}, NORM),
        ({k: v for k, v in mapped.items() if k != NORM}, NORM),
        ({**mapped, "more": first}, "more"),
        ({**mapped, "more": "../secret.safetensors"}, "weight_map"),
        ({**mapped, "more": "model-3.safetensors"}, "model-3"),
        ({**mapped, "more": 3}, "weight_map"),
        ([], "weight_map"),
    ):
        write_index(tmp_path, wrong)
        assert says in str(refusal(tmp_path))
    write_index(tmp_path, mapped)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / first).read_bytes())
    assert "both" in refusal(tmp_path).found
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    assert f"in {first} and in {second}" in refusal(tmp_path).found
