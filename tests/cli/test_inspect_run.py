"""`dspark inspect` on the folder of a run: every stage, its state, and faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark.artifacts import Kind, begin, finish, new_manifest, parent_of
from dspark.cli.inspect import describe, inspect_path
from dspark.errors import ConfigError


def stage(root: Path, kind: Kind, *parents: Kind, unfinished: bool = False) -> None:
    folder = root / kind
    made_of = [parent_of(root / parent, parent, folder) for parent in parents]
    manifest = new_manifest(kind, {"of": "a test"}, made_of, counts={"rows": 1234567})
    begin(folder, manifest)
    (folder / "rows.jsonl").write_text("{}\n" * 100)
    if not unfinished:
        finish(folder, manifest)


@pytest.fixture
def made_run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    stage(root, "prompts")
    stage(root, "answers", "prompts")
    stage(root, "states", "answers", unfinished=True)
    (root / "report.html").write_text("<p>")
    (root / "prompts.previous-1").mkdir()
    return root


def states(root: Path, deep: bool = False) -> dict[str, str]:
    return {own["kind"]: own["state"] for own in describe(root, deep=deep)["stages"]}


def test_a_runs_folder_lists_its_stages(
    made_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect_path(made_run, as_json=True, deep=False)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["kind"] == "run"
    assert found["report"] == str(made_run / "report.html")
    assert found["previous"] == ["prompts.previous-1"]
    own = {one["kind"]: one for one in found["stages"]}
    assert {kind: one["state"] for kind, one in own.items()} == {
        "prompts": "finished", "answers": "finished", "states": "interrupted",
        "draft": "missing", "bench": "missing",
    }  # fmt: skip
    assert own["answers"]["counts"] == {"rows": 1234567}
    assert own["answers"]["bytes"] == 300
    assert own["states"]["bytes"] > 300
    assert own["states"]["created"][:2] == "20"
    monkeypatch.setenv("COLUMNS", "80")
    assert inspect_path(made_run, as_json=False, deep=False)
    page = capsys.readouterr().out
    for text in ("prompts", "finished", "interrupted", "missing", "1,234,567", "report.html"):
        assert text in page


def test_stages_of_another_parent_are_stale_and_damage_is_found(
    made_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(made_run / "prompts")
    (made_run / "prompts").mkdir()
    folder = made_run / "prompts"
    manifest = new_manifest("prompts", {"of": "other settings"})
    begin(folder, manifest)
    finish(folder, manifest)
    found = describe(made_run, deep=False)
    assert states(made_run)["answers"] == "stale"
    assert "prompts" in found["stages"][1]["why"]
    rows = made_run / "answers" / "rows.jsonl"
    rows.write_text("[]\n" * 100)  # of the same size: only hashes see it
    assert states(made_run)["answers"] == "stale"
    assert states(made_run, deep=True)["answers"] == "damaged"
    assert not inspect_path(made_run, as_json=False, deep=True)
    assert "rows.jsonl" in "".join(capsys.readouterr().out.split())
    rows.unlink()
    assert states(made_run)["answers"] == "damaged"


def test_another_folder_is_said_to_be_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError) as told:
        describe(tmp_path, deep=False)
    text = str(told.value)
    assert all(word in text for word in ("artifact", "run", "draft", "recipe", "neither"))
