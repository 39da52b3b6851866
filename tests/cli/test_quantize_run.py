"""From a finished run to a served FP8 draft, by the commands a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import dspark_each


@pytest.mark.timeout(600)
def test_a_trained_draft_is_quantized_proved_and_measured(tiny_run: Path, tmp_path: Path) -> None:
    draft, out = tiny_run / "draft", tmp_path / "fp8"
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"{name} has 3 and gets 4" for name in ("tom", "mia", "ben")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = ("bench.max_new_tokens=32", "bench.speed_prompts=1", "bench.repeats=1",
               "--prompts", str(prompts))  # fmt: skip
    figures = [tmp_path / "draft.json", tmp_path / "fp8.json"]
    done, proved, *measured, exported = dspark_each(
        ["quantize", str(draft), str(out)],
        ["quantize", "--check", str(out), str(draft)],
        ["bench", str(draft), *options, "--out", str(figures[0])],
        ["bench", str(out), *options, "--out", str(figures[1])],
        ["export", str(out), "--to", "k3", str(tmp_path / "export")],
    )
    assert done.returncode == 0, done.stderr
    assert "12 of" in done.stdout
    assert proved.returncode == 0, proved.stderr
    for each in measured:
        assert each.returncode == 0, each.stderr
    rows = [json.loads(file.read_text())["results"] for file in figures]
    for before, after in zip(*rows, strict=True):
        assert before["temperature"] == after["temperature"]
        if after["temperature"] == 0:
            assert after["identical_to_plain"] == [3, 3]
        assert abs(after["acceptance_length"] - before["acceptance_length"]) < 1.5
    assert exported.returncode == 1
    assert "quantized" in exported.stderr
