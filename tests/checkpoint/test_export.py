"""`dspark export`: every published field, every number unchanged, and nothing invented."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import dspark, dspark_each
from dspark.checkpoint.draft import TARGET_NOTE, load_draft, save_draft
from dspark.checkpoint.export import CARD, Exportable, open_export, write_export
from dspark.checkpoint.layout import EMBEDDING
from dspark.checkpoint.published import FORBIDDEN, read_config
from dspark.checkpoint.shards import INDEX, WEIGHTS
from dspark.checkpoint.tensors import digest_of
from dspark.checkpoint.writer import Written
from dspark.errors import CheckpointError, ForeignArtifactError
from made_drafts import TARGET, saved_draft, tiny_draft, tiny_qwen3

# docs/contract.md, section 9, written out by hand.
K3_FIELDS = [
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "target_layer_ids",
    "num_target_layers",
    "target_num_hidden_layers",
    "target_hidden_size",
    "mask_token_id",
    "dspark_noise_token_id",
    "markov_rank",
    "dspark_markov_rank",
    "markov_head_type",
    "block_size",
    "dspark_block_size",
    "dspark_target_layer_ids",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
    "dspark_bonus_anchor",
    "tie_word_embeddings",
    "torch_dtype",
    "dspark_provenance",
]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A saved fp32 draft whose provenance knows the target's embedding."""
    folder = tmp_path / "draft"
    folder.mkdir()
    made = tiny_draft()
    known = digest_of(made.embed_tokens.weight.detach())["sha256"]
    save_draft(folder, made, {**TARGET, TARGET_NOTE: known}, torch.float32)
    return folder


def export(source: Path | Exportable, out: Path, **options: Any) -> Written:
    found = open_export(source, "k3") if isinstance(source, Path) else source
    plain: dict[str, Any] = {"dtype": None, "slim": False, "told": {}, "card": lambda _: "card"}
    return write_export(found, out, **(plain | options))


def test_config_has_every_published_field_and_none_of_the_forbidden(
    draft: Path, tmp_path: Path
) -> None:
    export(draft, tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sorted(raw) == sorted(K3_FIELDS)
    assert not FORBIDDEN.keys() & raw.keys()
    assert raw["architectures"] == ["K3DSparkModel"]
    assert raw["model_type"] == "k3_dspark"
    assert raw["num_target_layers"] == len(raw["target_layer_ids"]) == 2
    assert raw["target_num_hidden_layers"] == 4
    assert raw["sample_from_anchor"] is True
    assert raw["dspark_bonus_anchor"] is False
    assert "attention_factor" not in raw["rope_parameters"]
    assert "mscale_all_dim" in raw["rope_parameters"]
    assert raw["torch_dtype"] == "float32"
    aliases = {"dspark_noise_token_id": "mask_token_id", "dspark_markov_rank": "markov_rank",
               "dspark_block_size": "block_size", "dspark_target_layer_ids": "target_layer_ids",
               "draft_vocab_size": "vocab_size", "num_key_value_heads": "num_attention_heads"}  # fmt: skip
    for alias, field in aliases.items():
        assert raw[alias] == raw[field]


def test_weights_are_byte_for_byte_the_draft(draft: Path, tmp_path: Path) -> None:
    written = export(draft, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (draft / WEIGHTS).read_bytes()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {WEIGHTS, "config.json", CARD}
    _, provenance = read_config(tmp_path / "out")
    assert provenance["files"] == written.files
    own = load_file(draft / WEIGHTS)[EMBEDDING]
    assert provenance["embedding"] == {"included": True, **digest_of(own)}
    assert provenance[TARGET_NOTE] == digest_of(own)["sha256"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_rounds_every_number_once(
    draft: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    export(draft, tmp_path / "out", dtype=dtype)
    rounded = load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in load_file(draft / WEIGHTS).items():
        assert rounded[name].equal(tensor.to(dtype)), name
    _, provenance = read_config(tmp_path / "out")
    assert provenance["embedding"]["sha256"] == provenance[TARGET_NOTE]
    # What it says of the target still holds against the target itself.
    target = load_file(draft / WEIGHTS)[EMBEDDING]
    load_draft(tmp_path / "out", embedding=target)


def test_a_number_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "loud"
    folder.mkdir()
    made = tiny_draft()
    with torch.no_grad():
        made.context_norm.weight[3] = 1e5
    save_draft(folder, made, TARGET, torch.float32)
    with pytest.raises(CheckpointError, match=r"context_norm\.weight in F16 holds NaN or infinity"):
        export(folder, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export(folder, tmp_path / "out", dtype=torch.bfloat16)


def test_slim_leaves_only_the_embedding_out(draft: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "slim", slim=True, dtype=torch.bfloat16)
    whole, slim = load_file(draft / WEIGHTS), load_file(tmp_path / "slim" / WEIGHTS)
    assert whole.keys() - slim.keys() == {EMBEDDING}
    own = whole[EMBEDDING]
    _, provenance = read_config(tmp_path / "slim")
    rounded = digest_of(own.to(torch.bfloat16))
    assert provenance["embedding"] == {"included": False, **rounded}
    loaded, _ = load_draft(tmp_path / "slim", embedding=own)
    assert loaded.embed_tokens.weight.equal(own.to(torch.bfloat16).float())
    with pytest.raises(CheckpointError, match="slim"):
        load_draft(tmp_path / "slim")
    # A slim draft can be exported again as it is, but not completed.
    again = open_export(tmp_path / "slim", "k3")
    export(again, tmp_path / "again", slim=True)
    assert read_config(tmp_path / "again")[1]["embedding"] == provenance["embedding"]
    for options in ({}, {"slim": True, "dtype": torch.float32}):
        with pytest.raises(CheckpointError, match="a draft with its embedding"):
            export(again, tmp_path / "no", **options)


def test_shards_are_written_and_read(draft: Path, tmp_path: Path) -> None:
    written = export(draft, tmp_path / "out", max_shard_bytes=4000)
    assert len(written.files) > 2
    assert (tmp_path / "out" / INDEX).is_file()
    loaded, _ = load_draft(tmp_path / "out")
    state = load_draft(draft)[0].state_dict()
    assert all(loaded.state_dict()[n].equal(t) for n, t in state.items())


def test_an_embedding_that_is_not_the_targets_is_not_published(draft: Path, tmp_path: Path) -> None:
    tensors = load_file(draft / WEIGHTS)
    tensors[EMBEDDING] = torch.randn(32, 16)
    save_file(tensors, draft / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} with sha256"):
        export(draft, tmp_path / "out")
    # Saved so by whoever made it: its own hash is right, the target's is not.
    random = tiny_draft(seed=9)
    known = json.loads((draft / "config.json").read_text())["dspark_provenance"][TARGET_NOTE]
    save_draft(draft, random, {**TARGET, TARGET_NOTE: known}, torch.float32)
    with pytest.raises(CheckpointError, match="the target's embedding"):
        open_export(draft, "k3")
    assert not (tmp_path / "out").exists()


def test_another_flavour_is_refused_with_the_reason(draft: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_export(draft, "qwen3")
    assert "latent rows" in caught.value.found
    assert "draft.flavour=qwen3" in caught.value.fix
    saved_draft(tmp_path / "qwen3", config=tiny_qwen3())
    with pytest.raises(CheckpointError, match="grouped keys and values"):
        open_export(tmp_path / "qwen3", "k3")
    found = open_export(tmp_path / "qwen3", "qwen3")
    export(found, tmp_path / "out")
    assert load_draft(tmp_path / "out")[0].config == tiny_qwen3()


def test_an_unsound_draft_is_not_exported(draft: Path, tmp_path: Path) -> None:
    tensors = load_file(draft / WEIGHTS)
    tensors["context_norm.weight"][0] = float("nan")
    save_file(tensors, draft / WEIGHTS)
    with pytest.raises(CheckpointError, match="NaN"):
        export(draft, tmp_path / "out")
    del tensors["context_norm.weight"]
    save_file(tensors, draft / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"missing context_norm\.weight"):
        open_export(draft, "k3")
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_left_alone(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    with pytest.raises(ForeignArtifactError):
        export(draft, out)
    assert [p.name for p in out.iterdir()] == ["notes"]


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_draft_without_figures_says_so_on_its_card(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done, plan, wrong, nothing = dspark_each(
        ["export", str(draft), str(out), "--to", "k3", "--dtype", "bfloat16", "--slim"],
        ["export", str(draft), str(tmp_path / "no"), "--to", "k3", "--plan"],
        ["export", str(draft), str(tmp_path / "no"), "--to", "qwen3"],
        ["export", str(tmp_path / "none"), str(tmp_path / "no"), "--to", "k3"],
    )
    assert done.returncode == 0, done.stderr
    card = (out / CARD).read_text()
    assert "Nothing was measured" in card
    assert "no `embed_tokens.weight`" in card
    assert f"base_model: {TARGET['target']}" in card
    _, provenance = read_config(out)
    assert "expected_acceptance" not in provenance
    assert len(provenance["exported_from_sha256"]) == 64
    assert provenance["files"][WEIGHTS]["sha256"] in card
    assert plan.returncode == 0
    assert wrong.returncode == 1
    assert "latent rows" in wrong.stderr
    assert nothing.returncode == 2
    assert "no such file or folder" in nothing.stderr
    assert not (tmp_path / "no").exists()


def test_a_run_is_exported_with_its_own_figures_and_runs_again(
    tiny_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = dspark("export", str(tiny_run), str(out), "--to", "k3")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tiny_run / "bench" / "results.json").read_text())
    card = (out / CARD).read_text()
    for row in rows:
        assert (
            f"| {row['prompts']} | {row['temperature']} | {row['acceptance_length']:.2f} |" in card
        )
        assert f"| {row['speedup']:.2f}x |" in card
    assert "verification: block" in card
    _, provenance = read_config(out)
    assert provenance["expected_acceptance"]["measured"] == rows
    own = load_draft(tiny_run / "draft")[0].state_dict()
    loaded = load_draft(out)[0].state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in own.items())
    asked = ("--prompts", str(tiny_run.parent / "prompts.jsonl"), "bench.prompts_per_category=2",
             "bench.repeats=1", "bench.temperatures=[0.0]", "bench.max_new_tokens=32")  # fmt: skip
    slim, *benches = dspark_each(
        ["export", str(tiny_run / "draft"), str(tmp_path / "slim"), "--to", "k3", "--slim"],
        ["bench", str(out), *asked],
        ["bench", str(tmp_path / "slim"), *asked],
    )
    assert slim.returncode == 0, slim.stderr
    for bench in benches:
        assert bench.returncode == 0, bench.stderr
        assert "2 of 2" in bench.stdout


def test_figures_of_another_draft_are_left_out(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    manifest = run / "draft" / "manifest.json"
    raw = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**raw, "created": "2020-01-01T00:00:00+00:00"}))
    done = dspark("export", str(run), str(tmp_path / "out"), "--to", "k3")
    assert done.returncode == 0, done.stderr
    assert "another draft" in done.stdout
    assert "Nothing was measured" in (tmp_path / "out" / CARD).read_text()
