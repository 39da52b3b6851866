"""What is wrong with the words of a command: what is allowed, and what was probably meant."""

from __future__ import annotations

import pytest

from dspark.cli.main import entry


def refused(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, str]:
    """The four parts that a command ends with."""
    with pytest.raises(SystemExit) as left:
        entry(line.split())
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    parts = [row.strip().split("  ", 1) for row in said.err.splitlines()]
    assert [name for name, _ in parts] == ["Error", "expected", "found", "what to do"]
    return dict(parts)


@pytest.mark.parametrize(
    ("line", "where", "allowed", "fix"),
    [
        ("serve x --scheduler asinc", "serve --scheduler", "threshold", "Did you mean async"),
        ("serve x --scheduler nonsense", "serve --scheduler", "async", "Choose one of: fixed"),
        ("serve x --role decod", "serve --role", "prefill, decode", "Did you mean decode?"),
        ("export x y --to nonsense", "export --to", "k3, qwen3", "Choose one of: k3, qwen3."),
        ("export x y --to qwen", "export --to", "k3, qwen3", "Did you mean qwen3?"),
        ("doctor . --engine vlm", "doctor --engine", "vllm, atom", "Did you mean vllm?"),
        ("serve x --schedular fixed", "serve", "an option", "Did you mean --scheduler?"),
        ("serve x --port abc", "serve --port", "a valid integer", "serve --help"),
        ("serve x --port", "--port", "a value", "--help"),
        ("serve", "serve", "DRAFT|RUN", "Write dspark serve"),
        ("benhc", "dspark", "a verb: run", "Did you mean bench?"),
        ("generate x", "generate", "at least one --prompt", "generate DRAFT --prompt"),
        ("generate x y --prompt z", "generate", "one draft folder", "Name one"),
        ("inspect . --rows 3 --json", "inspect --rows", "--rows alone", "Leave --json"),
        ("bench . --prompts nil", "bench --prompts", "JSON Lines of prompts", "current folder"),
        ("bench . --data nil", "bench --data", "a file or folder", "Check the path"),
        ("verify . --prompts nil", "verify --prompts", "a file or folder", "Check the path"),
        ("doctor . --prompts nil", "doctor --prompts", "a file or folder", "Check the path"),
        ("calibrate . --prompts nil", "calibrate --prompts", "a file or folder", "Check the path"),
        ("compare a b --data nil", "compare --data", "a file or folder", "Check the path"),
        ("compare --from-table nil", "compare --from-table", "a file or folder", "Check the path"),
        ("prompts x --data nil", "prompts --data", "a file or folder", "Check the path"),
    ],
)
def test_wrong_words_say_what_is_allowed_and_what_to_do(
    capsys: pytest.CaptureFixture[str], line: str, where: str, allowed: str, fix: str
) -> None:
    parts = refused(capsys, line)
    assert where in parts["Error"]
    assert allowed in parts["expected"]
    assert fix in parts["what to do"]


def test_help_and_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (([], 2), (["--help"], 0), (["run", "--help"], 0), (["--version"], 0)):
        with pytest.raises(SystemExit) as left:
            entry(words)
        assert (left.value.code or 0) == code
        said = capsys.readouterr()
        assert "dspark" in said.out + said.err
        assert "what to do" not in said.err
