"""Rows as a person reads them: what is trained on stands out, and the same seed shows the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dspark.cli.show_rows import CONTEXT, TRAINED, masked_text, show_rows
from dspark.config.prompts import FileSource, PromptsSection
from dspark.data.prompts import build_prompts
from dspark.errors import MissingArtifactError
from dspark.hidden.answers import Answer, write_answers


def shown(folder: Path, kind: str, count: int, seed: int = 0, decode=None) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    show_rows(folder, kind, count, seed, console, decode)
    return console.file.getvalue()


def test_the_mask_decides_the_colour_of_each_run() -> None:
    text = masked_text([1, 2, 3, 4], [0, 1, 1, 0], lambda ids: "".join("abcd"[i - 1] for i in ids))
    assert text.plain == "abcd"
    assert [(s.start, s.end, s.style) for s in text.spans] == [
        (0, 1, CONTEXT), (1, 3, TRAINED), (3, 4, CONTEXT),
    ]  # fmt: skip
    assert masked_text([7, 8], [0, 1], None).plain == "7 8 "


def test_prompts_are_sampled_by_seed(tmp_path: Path) -> None:
    rows = [{"turns": [f"[bold]question {n}[/bold]", "then"]} for n in range(30)]
    rows += [{"input_ids": [5, 6], "loss_mask": [0, 1]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource(kind="file", path=str(path), category="chat", train="all")
    (tmp_path / "out").mkdir()
    section = PromptsSection(sources=(source,), workload=("chat",))
    build_prompts(section, tmp_path / "out", None, keep_ids=True)
    first = shown(tmp_path / "out", "prompts", 3)
    assert first == shown(tmp_path / "out", "prompts", 3)
    assert first != shown(tmp_path / "out", "prompts", 3, seed=1)
    everything = shown(tmp_path / "out", "prompts", 99)
    assert everything.count("later user turn") == 30
    assert "[bold]question 7[/bold]" in everything  # other people's text is no markup
    assert "5" in everything


def test_answers_show_prompt_and_generated_tokens(tmp_path: Path) -> None:
    answer = Answer(
        id="a-1", category="chat", temperature=0.0, prompt_length=2, finish_reason="stop",
        ids=(1, 2, 3),
    )  # fmt: skip
    (tmp_path / "shards").mkdir()
    write_answers(tmp_path / "shards" / "answers-00000-0.jsonl", [answer])
    text = shown(tmp_path, "answers", 1, decode=lambda ids: " ".join("pqr"[i - 1] for i in ids))
    assert "p q" in text
    assert "\x1b[1;32mr" in text
    assert "2 + 1 tokens" in text


def test_other_artifacts_have_no_rows(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match="prompts or answers"):
        shown(tmp_path, "states", 1)
