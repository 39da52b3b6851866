"""`dspark quantize --check`: any single bit, anywhere, is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_fp8 import edit_weights, pair, source
from safetensors.torch import load_file, save_file

from conftest import dspark, dspark_each
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.shards import WEIGHTS, open_weights
from dspark.errors import CheckpointError, DamagedArtifactError, DSparkError
from dspark.quantize import check as check_module
from dspark.quantize.check import check
from dspark.quantize.manifest import MANIFEST, PtqManifest, read_ptq_manifest, seal, text_of
from made_drafts import edit_config, tiny_qwen3

GATE = "layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``out`` beside ``source``; tests put back what they change."""
    return pair(tmp_path_factory.mktemp("fp8"))


def regions(out: Path) -> dict[str, tuple[Path, int, int]]:
    """Name -> file and range of bytes: every kind of content there is."""
    weights = open_weights(out)
    start = weights.files[0].data_start
    found = {"header": (out / WEIGHTS, 0, start)}
    for kind, name in {
        "codes": GATE,
        "scales": f"{GATE}_scale",
        "copied": "context_proj.weight",
    }.items():
        entry = weights.entries[name]
        found[kind] = (out / WEIGHTS, start + entry.start, start + entry.end)
    for name in ("config.json", MANIFEST):
        found[name] = (out / name, 0, (out / name).stat().st_size)
    return found


KINDS = ("header", "codes", "scales", "copied", "config.json", MANIFEST)


@settings(max_examples=240, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 1 << 30), st.integers(0, 7))
def test_any_flipped_bit_is_found(made: Path, kind: str, place: int, bit: int) -> None:
    path, start, end = regions(made)[kind]
    before = path.read_bytes()
    at = start + place % (end - start)
    data = bytearray(before)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    try:
        with pytest.raises(DSparkError):
            check(made, made.parent / "source")
    finally:
        path.write_bytes(before)


def test_an_untouched_folder_is_proved(made: Path) -> None:
    assert check(made, made.parent / "source") == read_ptq_manifest(made)


def test_the_place_of_a_changed_byte_is_named(made: Path) -> None:
    path, start, _ = regions(made)["copied"]
    before = path.read_bytes()
    data = bytearray(before)
    data[start + 5] ^= 1
    path.write_bytes(data)
    try:
        with pytest.raises(DamagedArtifactError, match=r"byte 5 of context_proj\.weight"):
            check(made, made.parent / "source")
    finally:
        path.write_bytes(before)


def test_a_manifest_that_lies_with_a_right_seal_is_found(made: Path) -> None:
    """Whoever edits the manifest and seals it again is told which figure is not so."""
    path = made / MANIFEST
    before, manifest = path.read_bytes(), read_ptq_manifest(made)
    lies: dict[str, PtqManifest] = {
        "totals": manifest.model_copy(
            update={"totals": manifest.totals.model_copy(update={"clamped": 10**6})}
        ),
        "exclusions": manifest.model_copy(update={"exclusions": {}}),
        "modules": manifest.model_copy(update={"modules": {}}),
        "tensors": manifest.model_copy(update={"tensors": manifest.tensors[1:]}),
        "scheme": manifest.model_copy(update={"scheme": {}}),
    }
    try:
        for key, lie in lies.items():
            path.write_text(text_of(seal(lie)))
            with pytest.raises(DamagedArtifactError, match=f"{key} as computed again"):
                check(made, made.parent / "source")
    finally:
        path.write_bytes(before)


def test_codes_are_also_held_against_the_weights_themselves(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the quantizer that both runs share is found by the bound, which has no part in it."""
    monkeypatch.setattr(check_module, "within_bounds", lambda *_: False)
    with pytest.raises(DamagedArtifactError, match="within half a step"):
        check(made, made.parent / "source")


def test_another_source_is_told_apart_from_damage(made: Path, tmp_path: Path) -> None:
    other = source(tmp_path / "other", tiny_qwen3())
    with pytest.raises(CheckpointError, match="another checkpoint"):
        check(made, other)
    same_sizes = edit_weights(source(tmp_path / "same"), lambda t: t[GATE].mul_(1.5))
    with pytest.raises((DamagedArtifactError, CheckpointError)):
        check(made, same_sizes)


def test_missing_and_extra_files_are_found(made: Path) -> None:
    extra = made / "notes.txt"
    extra.write_text("mine")
    try:
        with pytest.raises(DamagedArtifactError, match=r"notes\.txt"):
            check(made, made.parent / "source")
    finally:
        extra.unlink()
    path = made / MANIFEST
    before = path.read_bytes()
    path.unlink()
    try:
        with pytest.raises(DamagedArtifactError):
            check(made, made.parent / "source")
    finally:
        path.write_bytes(before)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder)
    return f"{caught.value.found} {caught.value.where}"


def test_the_loader_refuses_scales_and_codes_that_do_not_fit(tmp_path: Path) -> None:
    out = pair(tmp_path)
    whole = load_file(out / WEIGHTS)

    def with_changes(**changes: torch.Tensor | None) -> str:
        tensors = {**whole, **{k: v for k, v in changes.items() if v is not None}}
        kept = {n: t for n, t in tensors.items() if n not in changes or changes[n] is not None}
        save_file(kept, out / WEIGHTS)
        return refusal(out)

    scale = whole[f"{GATE}_scale"]
    assert f"missing {GATE}_scale" in with_changes(**{f"{GATE}_scale": None})
    context = {"context_proj.weight_scale": torch.ones(16, 1)}
    assert "unexpected context_proj.weight_scale" in with_changes(**context)
    assert "shape (24,)" in with_changes(**{f"{GATE}_scale": scale.flatten()})
    assert "dtype BF16" in with_changes(**{f"{GATE}_scale": scale.bfloat16()})
    assert f"{GATE} has dtype BF16" in with_changes(**{GATE: whole[GATE].bfloat16()})
    codes = whole["context_proj.weight"].to(torch.float8_e4m3fn)
    assert "context_proj.weight has dtype F8" in with_changes(**{"context_proj.weight": codes})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        wrong = scale.clone()
        wrong[2] = bad
        assert f"{GATE}_scale holds others" in with_changes(**{f"{GATE}_scale": wrong})
    nan = whole[GATE].clone()
    nan.view(torch.uint8)[1, 1] = 0x7F
    assert f"{GATE} holds NaN" in with_changes(**{GATE: nan})
    with pytest.raises(CheckpointError, match="the code of NaN"):
        load_draft(out, fp8="reference")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"format": "pack-quantized"}, "pack-quantized"),
        ({"config_groups": {}}, "config_groups"),
        ({"ignore": []}, "missing context_proj.weight_scale"),
        ({"ignore": None}, "None"),
        ({"ignore": ["re:("]}, "re:("),
        ({"kv_cache_scheme": {"num_bits": 8}}, "num_bits"),
    ],
)
def test_other_schemes_and_patterns_that_do_not_fit_the_file_are_refused(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    out = pair(tmp_path)
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    edit_config(out, quantization_config={**block, **change})
    assert says in refusal(out)


def test_the_block_as_other_tools_write_it_is_read(tmp_path: Path) -> None:
    out = pair(tmp_path)
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    for part in ("weights", "input_activations"):
        block["config_groups"]["group_0"][part] |= {"group_size": None, "observer": "minmax"}
    block["config_groups"]["group_0"]["output_activations"] = None
    edit_config(out, quantization_config={**block, "kv_cache_scheme": None, "version": "0.17"})
    load_draft(out)


def test_the_command_converts_checks_plans_and_reports(tmp_path: Path) -> None:
    made, out = source(tmp_path / "source"), tmp_path / "out"
    planned, done, proved, seen, mixed, wrong = dspark_each(
        ["quantize", str(made), str(tmp_path / "planned"), "--plan", "--json"],
        ["quantize", str(made), str(out), "--json"],
        ["quantize", "--check", str(out), str(made), "--json"],
        ["inspect", str(out), "--deep", "--json"],
        ["quantize", "--check", str(out), str(made), "--plan"],
        ["quantize", str(made), str(tmp_path / "b"), "--recipe", "phase9"],
    )
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert not (tmp_path / "planned").exists()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["totals"]["bytes"] == plan["bytes"]
    assert proved.returncode == 0, proved.stderr
    assert json.loads(proved.stdout) == found
    assert json.loads(seen.stdout)["faults"] == []
    assert mixed.returncode == 2
    assert "--plan" in mixed.stderr
    assert wrong.returncode == 2
    assert "phase1, phase2" in wrong.stderr
    data = bytearray((out / WEIGHTS).read_bytes())
    data[-1] ^= 64
    (out / WEIGHTS).write_bytes(data)
    damaged = dspark("quantize", "--check", str(out), str(made))
    assert damaged.returncode == 1
    assert "Traceback" not in damaged.stderr
