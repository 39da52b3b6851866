"""What verbs make of a path: a run's folder means its draft, and what is wrong is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import dspark_each
from dspark.artifacts import begin, new_manifest
from dspark.cli.main import entry
from dspark.cli.places import draft_folder, drafts_in, folder_to_examine, recipe_or_draft
from dspark.errors import CheckpointError, ConfigError
from made_drafts import saved_draft


def refuse(*commands: list[str]) -> dict[str, tuple[int, str]]:
    """Status and errors by command; none may import anything heavy."""
    done = dspark_each(*commands, light=True)
    return {" ".join(x.args): (x.returncode, " ".join(x.stderr.split())) for x in done}


def test_a_wrong_path_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    told = refuse(
        ["doctor", nothing], ["quantize", nothing, "out"], ["serve", nothing],
        ["serve", nothing, "--plan"], ["generate", nothing, "--prompt", "x"], ["bench", nothing],
        ["bench", nothing, "--suite", "quick"], ["calibrate", nothing], ["verify", nothing],
        ["compare", nothing, nothing], ["export", nothing, "out", "--to", "k3"], ["run", nothing],
        ["quantize", "--check", nothing, nothing], ["serve", nothing, "--engine", "vllm", "--plan"],
        ["bench", "--checkpoint", nothing, "--suite", "quick"], ["inspect", nothing],
        ["inspect", nothing, "--rows", "3"], ["prompts", nothing],
        ["prompts", "--input", nothing, "--out", "out"],
        *([verb, nothing] for verb in ("regenerate", "capture", "train", "teach", "import-config")),
    )  # fmt: skip
    for words, (code, text) in told.items():
        assert code == 2, words
        assert "no such" in text, (words, text)
        assert nothing in text, words
    for verb in ("bench", "calibrate"):
        text = told[f"{verb} {nothing}"][1]
        assert "a recipe (.yaml), a draft folder, or a run's folder" in text


@pytest.mark.parametrize("words", [["leaderboard"], ["init", "--plan"]])
def test_verbs_that_import_more_give_the_same_status_for_a_path_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb, *more = words
    out = ["out"] if verb == "init" else []
    with pytest.raises(SystemExit) as left:
        entry([verb, str(tmp_path / "nothing"), *out, *more])
    assert left.value.code == 2
    assert "no such" in capsys.readouterr().err


def test_a_folder_for_a_recipe_and_a_recipe_for_a_folder_are_told_apart(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\n")
    told = refuse(["run", str(tmp_path)], ["serve", str(recipe)], ["generate", str(recipe),
                  "--prompt", "x"])  # fmt: skip
    code, text = told[f"run {tmp_path}"]
    assert code == 2
    assert "a folder" in text
    assert "recipe (.yaml)" in text
    assert "permission" not in text
    assert "once it is trained" in told[f"serve {recipe}"][1]


def test_a_runs_folder_means_its_draft(tmp_path: Path) -> None:
    root = tmp_path / "run"
    begin(root / "prompts", new_manifest("prompts", {}))
    with pytest.raises(CheckpointError, match="not trained yet"):
        draft_folder(root)
    with pytest.raises(CheckpointError, match="dspark train"):
        recipe_or_draft(root, "bench")
    begin(root / "draft", new_manifest("draft", {}))
    with pytest.raises(CheckpointError, match="unfinished"):
        folder_to_examine(root)
    saved_draft(root / "draft")
    for named in (root, root / "draft"):
        assert draft_folder(named) == root / "draft"
        assert folder_to_examine(named) == root / "draft"
        assert recipe_or_draft(named, "bench") == root / "draft"
    sides = drafts_in([str(root), "tasks=a", "a.json"], "compare", 2, results=True)
    assert sides == [str(root / "draft"), "tasks=a", "a.json"]
    for mixed in (["nothing"], ["nothing", "http://x:1"], ["a", "b", "c"]):
        assert drafts_in(mixed, "compare", 2, results=True) == mixed
    odd = tmp_path / "odd"
    odd.mkdir()
    assert folder_to_examine(odd) == odd, "what a folder lacks is the doctor's to say"
    with pytest.raises(ConfigError):
        recipe_or_draft(tmp_path / "nothing", "bench")


def test_verbs_take_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_draft(tmp_path / "run" / "draft")
    begin(tmp_path / "run" / "states", new_manifest("states", {}))
    run = str(tmp_path / "run")
    for words in (["doctor", run, "--json"], ["quantize", run, str(tmp_path / "q"), "--plan"]):
        with pytest.raises(SystemExit) as left:
            entry(words)
        said = capsys.readouterr()
        assert left.value.code in (0, None), said.out + said.err


@pytest.mark.parametrize("words", [("export", "--to", "k3"), ("quantize",)])
def test_a_taken_output_folder_is_refused_before_a_bar_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    saved_draft(tmp_path / "draft")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    verb, *more = words
    with pytest.raises(SystemExit) as left:
        entry([verb, str(tmp_path / "draft"), str(tmp_path / "out"), *more])
    said = capsys.readouterr()
    assert left.value.code == 1
    assert said.out == ""
    assert "there already" in said.err
