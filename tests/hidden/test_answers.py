"""Answers as token ids: what was generated is what is read, and a torn file names its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dspark.errors import DataError
from dspark.hidden.answers import Answer, read_answers, write_answers


def make(name: str = "one", **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "id": name,
        "category": "maths",
        "temperature": 0.7,
        "prompt_length": 3,
        "finish_reason": "stop",
        "ids": (5, 6, 7, 8, 9),
    }
    return Answer(**values | changes)


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    answers = [make("a"), make("b", ids=(0, 163839, 2, 3), finish_reason="length")]
    assert write_answers(tmp_path / "answers.jsonl", answers) == 2
    assert read_answers(tmp_path / "answers.jsonl") == answers


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": (5, 6, 7)},  # nothing was generated
        {"prompt_length": 0},
        {"ids": (5, -1, 7, 8)},
        {"finish_reason": "abort"},
        {"loss_mask": [1, 1]},
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make(**wrong)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text[: len(text) - 20], 3),
        (lambda text: text.replace('"stop"', '"?"', 1), 1),
        (lambda text: "[1]\n" + text, 1),
        (lambda text: "", 0),
    ],
)
def test_a_damaged_file_names_its_line(tmp_path: Path, damage: Any, line: int) -> None:
    path = tmp_path / "answers.jsonl"
    write_answers(path, [make("a"), make("b"), make("c")])
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError) as caught:
        read_answers(path)
    assert caught.value.where == (f"{path}:{line}" if line else str(path))


def test_an_absent_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_answers(tmp_path / "answers.jsonl")
    (tmp_path / "answers.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError):
        read_answers(tmp_path / "answers.jsonl")
