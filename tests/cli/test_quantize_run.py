"""From a finished run to a served FP8 draft, by the commands a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import dspark


@pytest.mark.timeout(600)
def test_a_trained_draft_is_quantized_proved_and_measured(tiny_run: Path, tmp_path: Path) -> None:
    draft, out = tiny_run / "draft", tmp_path / "fp8"
    done = dspark("quantize", str(draft), str(out))
    assert done.returncode == 0, done.stderr
    assert "12 of" in done.stdout
    proved = dspark("quantize", "--check", str(out), str(draft))
    assert proved.returncode == 0, proved.stderr
    rows = {}
    for folder in (draft, out):
        figures = tmp_path / f"{folder.name}.json"
        options = ("bench.max_new_tokens=32", "bench.speed_prompts=1", "bench.repeats=1")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(
            "".join(
                json.dumps({"prompt": f"{n} has 3 and gets 4"}) + "\n"
                for n in ("tom", "mia", "ben")
            )
        )
        measured = dspark(
            "bench", str(folder), *options, "--prompts", str(prompts), "--out", str(figures)
        )
        assert measured.returncode == 0, measured.stderr
        rows[folder.name] = json.loads(figures.read_text())["results"]
    for before, after in zip(rows["draft"], rows["fp8"], strict=True):
        assert before["temperature"] == after["temperature"]
        if after["temperature"] == 0:
            assert after["identical_to_plain"] == [3, 3]
        assert abs(after["acceptance_length"] - before["acceptance_length"]) < 1.5
    exported = dspark("export", str(out), "--to", "k3", str(tmp_path / "export"))
    assert exported.returncode == 1
    assert "quantized" in exported.stderr
