"""`dspark inspect`: recipes, artifacts and anyone's checkpoint folders, sound or not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dspark.artifacts import begin, finish, new_manifest
from dspark.checkpoint.shards import WEIGHTS
from dspark.cli.inspect import describe
from dspark.cli.main import entry
from made_drafts import TARGET, edit_config, saved_draft, tiny_config


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of ``dspark inspect``, in this process."""
    with pytest.raises(SystemExit) as left:
        entry(["inspect", *arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_a_bare_checkpoint_needs_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_draft(tmp_path, torch.bfloat16)
    code, out, _ = run(capsys, str(tmp_path), "--json", "--deep")
    assert code == 0
    found = json.loads(out)
    assert found["kind"] == "checkpoint"
    assert found["faults"] == []
    assert found["tensors"] == 3 + 1 + 2 + 2 + 2 * 12
    assert found["bytes"] == {"BF16": 2 * found["parameters"]}
    assert found["trainable_parameters"] == found["parameters"] - 32 * 16
    assert found["row_width"] == 12
    assert found["cache_bytes_per_token"] == 2 * 2 * 12
    assert found["provenance"]["target"] == TARGET["target"]
    assert found["files"] == {WEIGHTS: (tmp_path / WEIGHTS).stat().st_size}
    assert sum(m["parameters"] for m in found["modules"]) == found["parameters"]
    code, page, _ = run(capsys, str(tmp_path))
    assert code == 0
    for text in ("layers.1", "vLLM", "ATOM", "SGLang", "markov_head", TARGET["target"]):
        assert text in page


def test_engines_that_lack_the_markov_head_are_said_not_to_serve_it(tmp_path: Path) -> None:
    saved_draft(tmp_path, config=tiny_config(markov_head_type="gated"))
    served = {view["engine"]: view["served"] for view in describe(tmp_path, deep=False)["engines"]}
    assert served["vLLM"] == served["ATOM"] == "no: it knows no Markov head of type gated"
    assert served["dspark"].startswith("yes")


def test_faults_are_listed_and_the_rest_is_still_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_draft(tmp_path)
    edit_config(tmp_path, drop=("sample_from_anchor",))
    code, out, _ = run(capsys, str(tmp_path), "--json")
    assert code == 1
    found = json.loads(out)
    assert found["tensors"] == 3 + 1 + 2 + 2 + 2 * 12
    assert "sample_from_anchor" in found["faults"][0]["where"]
    code, page, _ = run(capsys, str(tmp_path))
    assert code == 1
    assert "sample_from_anchor" in page


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kv_lora_rank": "x"}'])
def test_a_broken_config_json_is_a_fault_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    saved_draft(tmp_path)
    (tmp_path / "config.json").write_text(text)
    code, out, _ = run(capsys, str(tmp_path), "--json")
    assert code == 1
    assert json.loads(out)["faults"][0]["where"].startswith(str(tmp_path / "config.json"))


def test_damaged_and_missing_weights_are_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_draft(tmp_path)
    os.truncate(tmp_path / WEIGHTS, 300)
    code, out, _ = run(capsys, str(tmp_path), "--json")
    assert code == 1
    found = json.loads(out)
    assert found["faults"][0]["where"] == str(tmp_path / WEIGHTS)
    assert found["row_width"] == 12
    (tmp_path / WEIGHTS).unlink()
    assert run(capsys, str(tmp_path), "--json")[0] == 1


def test_only_deep_inspection_reads_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_draft(tmp_path)
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # fp32 NaN
    (tmp_path / WEIGHTS).write_bytes(content)
    assert run(capsys, str(tmp_path))[0] == 0
    code, page, _ = run(capsys, str(tmp_path), "--deep")
    assert code == 1
    assert "NaN" in page


def test_brackets_in_names_are_printed_and_not_taken_for_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "[red]a[/nothing]"
    saved_draft(folder)
    edit_config(folder, dspark_provenance={"note": "[bold]x[/wrong]"})
    code, page, err = run(capsys, str(folder))
    assert code == 0, err
    assert "[red]a[/nothing]" in page
    assert "[bold]x[/wrong]" in page


def test_a_finished_draft_shows_manifest_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    manifest = new_manifest("draft", {"made": "by a test"}, counts={"steps": 7})
    begin(folder, manifest)
    saved_draft(folder)
    finish(folder, manifest)
    code, out, _ = run(capsys, str(folder), "--json", "--deep")
    assert code == 0
    found = json.loads(out)
    assert found["kind"] == "draft"
    assert found["counts"] == {"steps": 7}
    assert found["row_width"] == 12
    assert found["lineage"][0]["kind"] == "draft"
    assert set(found["files"]) == {WEIGHTS, "config.json"}
    code, page, _ = run(capsys, str(folder))
    assert "lineage" in page
    assert "fingerprint" in page


@pytest.mark.parametrize("name", ["nothing", "notes.txt", "empty"])
def test_what_is_none_of_these_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, str(tmp_path / name))
    assert code in (1, 2)
    assert name in err
