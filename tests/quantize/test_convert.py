"""The conversion: exact bytes, whole or absent, resumable, the same for any number of threads."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from made_fp8 import convert, edit_weights, pair, source
from safetensors.torch import load_file, save_file

from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.shards import INDEX, WEIGHTS, open_weights
from dspark.config.architecture import DraftConfig
from dspark.errors import CheckpointError, ForeignArtifactError, QuantizationError, StorageError
from dspark.model.fp8 import FP8Linear, dequantize_rows, quantize_rows
from dspark.quantize import convert as convert_module
from dspark.quantize.check import check
from dspark.quantize.convert import quantize, work_folder
from dspark.quantize.manifest import read_ptq_manifest
from dspark.quantize.plan import make_plan
from made_drafts import edit_config, tiny_config, tiny_qwen3
from told import Told

GATE = "layers.0.mlp.gate_proj.weight"
WIDE = tiny_config(hidden_size=96, intermediate_size=208, q_lora_rank=48, target_hidden_size=96)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("config", [tiny_config(), tiny_qwen3(markov_head_type="gated")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_become_codes_and_scales_and_the_rest_stays_byte_for_byte(
    tmp_path: Path, config: DraftConfig, dtype: torch.dtype
) -> None:
    convert(source(tmp_path / "source", config, dtype=dtype), tmp_path / "out")
    before, after = load_file(tmp_path / "source" / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    fp8 = set(make_plan(tmp_path / "source", "phase1").fp8)
    assert set(after) == set(before) | {f"{name}_scale" for name in fp8}
    for name, tensor in before.items():
        if name in fp8:
            codes, scale = quantize_rows(tensor)
            assert after[name].view(torch.uint8).equal(codes.view(torch.uint8))
            assert after[f"{name}_scale"].equal(scale)
            assert after[f"{name}_scale"].shape == (len(tensor), 1)
        else:
            assert after[name].dtype == dtype
            assert after[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


def test_the_file_is_the_librarys_own_byte_for_byte(tmp_path: Path) -> None:
    out = pair(tmp_path)
    save_file(load_file(out / WEIGHTS), tmp_path / "again", {"format": "pt"})
    assert (tmp_path / "again").read_bytes() == (out / WEIGHTS).read_bytes()


def test_config_json_is_the_sources_with_the_contracts_block(tmp_path: Path) -> None:
    out = pair(tmp_path)
    raw = json.loads((out / "config.json").read_text())
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    assert raw["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": [
            r"re:.*context_proj$",
            r"re:.*context_kv_proj$",
            r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)$",
            r"re:.*markov_head.*",
            r"re:.*confidence_head.*",
            r"re:.*embed_tokens$",
            r"re:.*lm_head$",
        ],
    }
    old = json.loads((tmp_path / "source" / "config.json").read_text())
    for key, value in old.items():
        if key != "dspark_provenance":
            assert raw[key] == value
    old_note, note = old["dspark_provenance"], raw["dspark_provenance"]
    text = (tmp_path / "source" / "config.json").read_bytes()
    assert note.pop("quantized_from") == {
        "config_sha256": hashlib.sha256(text).hexdigest(),
        "recipe": {"name": "phase1", "include": [], "exclude": []},
    }
    old_note.pop("files")  # of other files
    assert note == old_note


def test_the_manifest_says_what_happened_to_every_tensor(tmp_path: Path) -> None:
    out = pair(tmp_path, WIDE)
    manifest = read_ptq_manifest(out)
    weights, before = open_weights(out), open_weights(tmp_path / "source")
    assert {t.name for t in manifest.tensors} == set(before.entries)
    for record in manifest.tensors:
        old, new = before.read(record.name), weights.read(record.name)
        assert record.source_sha256 == hashlib.sha256(old).hexdigest()
        assert record.sha256 == hashlib.sha256(new).hexdigest()
        assert (record.source_bytes, record.bytes) == (len(old), len(new))
        if record.role == "copied":
            assert record.sha256 == record.source_sha256
            assert record.scale is None
            continue
        assert record.scale is not None
        scales = weights.read(record.scale.name)
        assert record.scale.sha256 == hashlib.sha256(scales).hexdigest()
        assert record.scale.shape == (record.shape[0], 1)
        assert record.max_relative_error is not None
        assert 0 < record.max_relative_error <= 1 / 28 * (1 + 1e-5)
        assert record.sqnr_db is not None
        assert 25 < record.sqnr_db < 40
    totals = manifest.totals
    assert (totals.quantized_tensors, totals.quantized_modules) == (12, 10)
    assert totals.tensors == len(weights.entries) == 32 + 12
    assert totals.bytes == sum(e.bytes for e in weights.entries.values())
    assert totals.source_bytes == sum(e.bytes for e in before.entries.values())
    assert totals.quantized_source_bytes == 2 * totals.code_bytes
    assert set(manifest.versions) == {"dspark", "torch"}


def test_zero_rows_have_scale_one_and_are_counted(tmp_path: Path) -> None:
    def empty(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE][3] = 0.0
        tensors[GATE][5] = -0.0

    made = edit_weights(source(tmp_path / "source"), empty)
    manifest = convert(made, tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    for row in (3, 5):
        assert float(after[f"{GATE}_scale"][row]) == 1.0
        assert bool((after[GATE].view(torch.uint8)[row] == 0).all())
    assert manifest.totals.zero_rows == 2
    check(tmp_path / "out", made)


def test_two_runs_with_one_and_with_two_threads_give_the_same_bytes(tmp_path: Path) -> None:
    made = source(tmp_path / "source", tiny_config(hidden_size=512, intermediate_size=2048,
                                                   target_hidden_size=512))  # fmt: skip
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 1):  # one of them is left to the hashes
            torch.set_num_threads(count)
            convert(made, tmp_path / "out")
            assert torch.get_num_threads() == count
            found.append(bytes_of(tmp_path / "out"))
            shutil.rmtree(tmp_path / "out")
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_the_size_of_a_block_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = pair(tmp_path, WIDE)
    monkeypatch.setattr("dspark.quantize.stream.BLOCK", 300)
    monkeypatch.setattr("dspark.quantize.stream.COPY", 64)
    monkeypatch.setattr(convert_module, "WRITE", 7)
    convert(tmp_path / "source", tmp_path / "again")
    assert bytes_of(tmp_path / "again") == bytes_of(out)


def test_shards_stay_shards_with_scales_beside_their_weights(tmp_path: Path) -> None:
    made = source(tmp_path / "source")
    tensors = load_file(made / WEIGHTS)
    (made / WEIGHTS).unlink()
    names = sorted(tensors)
    homes = {n: f"model-0000{1 + (i % 3 == 0)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(homes.values()):
        save_file({n: tensors[n] for n in names if homes[n] == file}, made / file)
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    manifest = convert(made, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"][f"{GATE}_scale"] == homes[GATE]
    assert index["metadata"]["total_size"] == manifest.totals.bytes
    check(tmp_path / "out", made)
    load_draft(tmp_path / "out")


def test_it_takes_up_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source(tmp_path / "source")
    convert(made, tmp_path / "whole")
    plan = make_plan(made, "phase1")
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if sum(seen) > plan.source_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(plan, tmp_path / "out", stop)
    assert not (tmp_path / "out").exists()
    work = work_folder(tmp_path / "out")
    lines = (work / "journal.jsonl").read_text().splitlines()
    assert 3 < len(lines) < len(plan.order)
    # The line being written when the power went, and a tensor that never reached the disk.
    (work / "journal.jsonl").write_text("\n".join(lines)[:-40])
    lost = json.loads(lines[2])["name"]
    with open(work / WEIGHTS, "r+b") as file:
        file.seek(plan.files[WEIGHTS].offsets[lost])
        file.write(b"\0\0\0\1")
    done: list[str] = []
    real = convert_module.pass_tensor
    monkeypatch.setattr(
        convert_module, "pass_tensor", lambda p, n, *rest: (done.append(n), real(p, n, *rest))[1]
    )
    told = Told()
    quantize(plan, tmp_path / "out", told)
    assert lost in done
    assert told.kept > plan.source_bytes // 3
    assert told.kept + told.made == plan.source_bytes
    assert len(done) == len(plan.order) - (len(lines) - 1) + 2
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert not work.exists()


def test_a_changed_source_or_recipe_starts_anew(tmp_path: Path) -> None:
    made = source(tmp_path / "source")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(make_plan(made, "phase2"), tmp_path / "out", stop)
    manifest = convert(made, tmp_path / "out")
    assert manifest.recipe.name == "phase1"
    check(tmp_path / "out", made)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    plan = make_plan(source(tmp_path / "source"), "phase1")

    def again(_: int) -> None:
        quantize(plan, tmp_path / "out")

    with pytest.raises(StorageError, match="another `dspark quantize`"):
        quantize(plan, tmp_path / "out", again)


def refused(folder: Path, out: Path, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        convert(folder, out)
    assert not out.exists()
    assert not work_folder(out).exists()


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    out = pair(tmp_path)
    refused(out, tmp_path / "twice", QuantizationError, "quantized already")
    edit_config(out, drop=("quantization_config",))
    refused(out, tmp_path / "twice", QuantizationError, "config.json is silent")


def test_missing_extra_and_mistyped_tensors_are_refused(tmp_path: Path) -> None:
    made, out = source(tmp_path / "source"), tmp_path / "out"
    whole = load_file(made / WEIGHTS)
    edit_weights(made, lambda t: t.pop(GATE))
    refused(made, out, CheckpointError, f"missing {GATE}")
    save_file({**whole, f"{GATE}_scale": torch.ones(24, 1)}, made / WEIGHTS)
    refused(made, out, CheckpointError, "unexpected")
    save_file({**whole, GATE: whole[GATE].to(torch.int8)}, made / WEIGHTS)
    refused(made, out, CheckpointError, "dtype I8")
    save_file({**whole, GATE: whole[GATE].double()}, made / WEIGHTS)
    refused(made, out, CheckpointError, "found F64")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_leaves_nothing_behind(tmp_path: Path, value: float) -> None:
    made = source(tmp_path / "source")
    edit_weights(made, lambda t: t["layers.1.mlp.up_proj.weight"][3].fill_(value))
    refused(made, tmp_path / "out", QuantizationError, "layers.1.mlp.up_proj.weight holds NaN")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source(tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(made, tmp_path / "out", StorageError, "of free disk")


def test_a_disk_that_fills_up_keeps_the_work_and_shows_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real, left = source(tmp_path / "source"), convert_module.os.pwrite, [20]

    def full(fd: int, data: bytes, place: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(fd, data, place)

    monkeypatch.setattr(convert_module.os, "pwrite", full)
    with pytest.raises(StorageError, match="run the same command again"):
        convert(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    left[0] = 10_000
    convert(made, tmp_path / "out")
    check(tmp_path / "out", made)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    made = source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(ForeignArtifactError):
        convert(made, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("config", [WIDE, tiny_qwen3(hidden_size=64, target_hidden_size=64)])
@pytest.mark.parametrize("recipe", ["phase1", "phase2"])
def test_the_loader_takes_them_in_every_form(
    tmp_path: Path, config: DraftConfig, recipe: str
) -> None:
    out = pair(tmp_path, config, recipe)
    before = load_file(tmp_path / "source" / WEIGHTS)
    plain, provenance = load_draft(out)
    assert provenance["quantized_from"]["recipe"]["name"] == recipe
    fp8 = make_plan(tmp_path / "source", recipe).fp8
    for name, tensor in plain.state_dict().items():
        known = before[name].float()
        expected = dequantize_rows(*quantize_rows(known)) if name in fp8 else known
        assert tensor.equal(expected), name
    codes, _ = load_draft(out, dtype=torch.bfloat16, fp8="reference")
    modules = {n for n, m in codes.named_modules() if isinstance(m, FP8Linear)}
    assert {f"{name}.weight" for name in modules} == fp8
