"""Artifact folders: finished means whole, unfinished resumes, nothing is lost, nothing escapes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dspark import artifacts
from dspark.artifacts import Manifest
from dspark.artifacts.changes import changed_keys
from dspark.errors import (
    ArtifactError,
    DamagedArtifactError,
    ForeignArtifactError,
    MissingArtifactError,
    StorageError,
)

CONFIG: dict[str, Any] = {"seed": 1, "ids": [1, 2], "rate": 0.5}


def make(folder: Path, config: dict[str, Any] = CONFIG, **kwargs: Any) -> Manifest:
    """A finished artifact of two files, one in a subfolder."""
    manifest = artifacts.new_manifest(kwargs.pop("kind", "states"), config, **kwargs)
    artifacts.begin(folder, manifest)
    artifacts.atomic_write(folder / "records.bin", bytes(range(256)) * 40)
    (folder / "shards").mkdir()
    artifacts.atomic_write(folder / "shards" / "a.txt", "één\n")
    return artifacts.finish(folder, manifest)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / artifacts.MANIFEST
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_a_finished_artifact_reads_back_equal_and_verifies(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    made = make(folder, counts={"records": 40}, notes={"norm": "post"})
    assert artifacts.verify(folder, "states", deep=True) == made
    assert set(made.files) == {"records.bin", "shards/a.txt"}
    assert made.files["records.bin"].bytes == 10_240
    assert made.counts == {"records": 40}
    assert artifacts.is_current(folder, made.fingerprint)
    assert not (folder / artifacts.STAGE).exists()


# --- fingerprints --------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_kind_config_and_parents_but_not_with_key_order(
    tmp_path: Path,
) -> None:
    make(tmp_path / "a", kind="answers")
    parent = artifacts.parent_of(tmp_path / "a", "answers", tmp_path / "s")
    base = artifacts.fingerprint("states", CONFIG)
    assert artifacts.fingerprint("states", dict(reversed(CONFIG.items()))) == base
    others = {
        artifacts.fingerprint("draft", CONFIG),
        artifacts.fingerprint("states", CONFIG | {"seed": 2}),
        artifacts.fingerprint("states", CONFIG, [parent]),
    }
    assert len(others | {base}) == 4
    moved = parent.model_copy(update={"path": "elsewhere"})
    assert artifacts.fingerprint("states", CONFIG, [moved]) in others


# --- damage --------------------------------------------------------------------------------------


def test_a_flipped_byte_passes_the_shallow_check_and_fails_the_deep_one(tmp_path: Path) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / "records.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    artifacts.verify(tmp_path / "s", "states")
    with pytest.raises(DamagedArtifactError) as caught:
        artifacts.verify(tmp_path / "s", "states", deep=True)
    assert caught.value.where == str(file)
    assert "sha256" in caught.value.expected


def test_a_truncated_file_fails_the_shallow_check_and_is_not_current(tmp_path: Path) -> None:
    made = make(tmp_path / "s")
    file = tmp_path / "s" / "shards" / "a.txt"
    os.truncate(file, 2)
    with pytest.raises(DamagedArtifactError, match="6 bytes; found 2 bytes") as caught:
        artifacts.verify(tmp_path / "s")
    assert caught.value.where == str(file)
    assert not artifacts.is_current(tmp_path / "s", made.fingerprint)


def test_an_absent_file_and_a_pipe_in_its_place_are_damage(tmp_path: Path) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / "records.bin"
    file.unlink()
    with pytest.raises(DamagedArtifactError, match="No such file"):
        artifacts.verify(tmp_path / "s")
    os.mkfifo(file)
    with pytest.raises(DamagedArtifactError, match="plain file"):
        artifacts.verify(tmp_path / "s", deep=True)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "Expecting value"),
        (b'{"tool": "dspark"', "delimiter"),
        (b"\xff", "codec"),
        (b"[" * 100_000, "recursion"),
        (b'{"tool": "dspark", "schema_version": 1, "kind": "states"}', "Field required"),
    ],
)
def test_an_unreadable_manifest_is_damage(tmp_path: Path, content: bytes, found: str) -> None:
    make(tmp_path / "s")
    (tmp_path / "s" / artifacts.MANIFEST).write_bytes(content)
    with pytest.raises(DamagedArtifactError) as caught:
        artifacts.read_manifest(tmp_path / "s", "states")
    assert found in caught.value.found


def test_a_manifest_whose_config_was_edited_is_damage(tmp_path: Path) -> None:
    make(tmp_path / "s")
    edit(tmp_path / "s", lambda raw: raw["config"].update(seed=2))
    with pytest.raises(DamagedArtifactError, match="fingerprint"):
        artifacts.read_manifest(tmp_path / "s", "states")


# --- foreign -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kind": "draft"}, "kind 'draft'"),
        ({"kind": "poems"}, "kind 'poems'"),
        ({"schema_version": 2}, "version 2"),
        ({"schema_version": None}, "version None"),
        ({"tool": "another"}, "another program"),
    ],
)
def test_another_kind_schema_or_program_is_foreign(
    tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    make(tmp_path / "s")
    edit(tmp_path / "s", lambda raw: raw.update(change))
    with pytest.raises(ForeignArtifactError) as caught:
        artifacts.read_manifest(tmp_path / "s", "states")
    assert found in caught.value.found


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "shards/../../secret", "", ".", "a//b", "a\\b", "a\0b"]
)
def test_a_file_name_that_leaves_the_folder_is_foreign(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    made = make(tmp_path / "s")
    entry = made.files["records.bin"].model_dump()
    edit(tmp_path / "s", lambda raw: raw["files"].update({name: entry}))
    with pytest.raises(ForeignArtifactError, match="inside the folder"):
        artifacts.read_manifest(tmp_path / "s", "states")


def test_a_link_out_of_the_folder_is_foreign_and_one_inside_is_fine(tmp_path: Path) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / "records.bin"
    shutil.copy(file, tmp_path / "same_content.bin")
    file.rename(tmp_path / "s" / "renamed.bin")
    file.symlink_to("renamed.bin")
    artifacts.verify(tmp_path / "s", "states", deep=True)
    file.unlink()
    file.symlink_to(tmp_path / "same_content.bin")
    with pytest.raises(ForeignArtifactError, match=r"records\.bin"):
        artifacts.verify(tmp_path / "s", "states", deep=True)


@pytest.mark.parametrize("what", ["link", "folder link", "pipe"])
def test_finish_refuses_what_it_cannot_vouch_for(tmp_path: Path, what: str) -> None:
    manifest = artifacts.new_manifest("states", CONFIG)
    folder = artifacts.begin(tmp_path / "s", manifest)
    if what == "pipe":
        os.mkfifo(folder / "odd")
    else:
        outside = tmp_path / "outside"
        outside.mkdir() if what == "folder link" else outside.write_text("x")
        (folder / "odd").symlink_to(outside)
    with pytest.raises(ForeignArtifactError):
        artifacts.finish(folder, manifest)
    with pytest.raises(MissingArtifactError):
        artifacts.read_manifest(folder)


def test_finish_refuses_a_folder_begun_for_something_else(tmp_path: Path) -> None:
    artifacts.begin(tmp_path / "s", artifacts.new_manifest("states", {"seed": 9}))
    with pytest.raises(ForeignArtifactError, match="begun for"):
        artifacts.finish(tmp_path / "s", artifacts.new_manifest("states", CONFIG))


# --- missing, resuming, moving aside -------------------------------------------------------------


def test_absent_empty_and_interrupted_folders_are_missing_and_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("absent", "empty", "file"):
        with pytest.raises(MissingArtifactError, match="no manifest"):
            artifacts.read_manifest(tmp_path / name, "states")
    artifacts.begin(tmp_path / "s", artifacts.new_manifest("states", CONFIG))
    with pytest.raises(MissingArtifactError, match=r"interrupted .* Run the same stage again"):
        artifacts.read_manifest(tmp_path / "s", "states")


def test_the_same_fingerprint_keeps_unfinished_work(tmp_path: Path) -> None:
    mark = artifacts.new_manifest("states", CONFIG)
    folder = artifacts.begin(tmp_path / "s", mark)
    artifacts.atomic_write(folder / "shard-0", b"done")
    (folder / ".dspark-0123.partial").write_bytes(b"ha")
    assert artifacts.begin(folder, mark) == folder
    assert (folder / "shard-0").read_bytes() == b"done"
    assert not list(folder.glob("*.partial"))
    assert os.listdir(tmp_path) == ["s"]


def test_another_fingerprint_moves_old_work_aside_with_its_content(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    first = make(folder)
    artifacts.begin(folder, artifacts.new_manifest("states", {"seed": 2}))
    artifacts.atomic_write(folder / "half", b"unfinished")
    artifacts.begin(folder, artifacts.new_manifest("states", {"seed": 3}))
    assert os.listdir(folder) == [artifacts.STAGE]
    assert artifacts.verify(tmp_path / "s.previous-1", "states", deep=True) == first
    assert (tmp_path / "s.previous-2" / "half").read_bytes() == b"unfinished"


def reasons(folder: Path, manifest: Manifest) -> list[str]:
    told: list[str] = []
    artifacts.begin(folder, manifest, lambda aside, why: told.append(f"{aside.name}: {why}"))
    return told


def test_what_is_moved_aside_says_where_it_went_and_which_settings_changed(tmp_path: Path) -> None:
    config = {"train": {"rate": 0.1, "loss": {"ce": 1, "l1": 2}}, "ids": [1, 2], "old": 1}
    new = {"train": {"rate": 0.2, "loss": {"ce": 1, "l1": 3}}, "ids": [1, 2, 3], "new": None}
    make(tmp_path / "s", config)
    told = reasons(tmp_path / "s", artifacts.new_manifest("states", new))
    assert told == ["s.previous-1: changed: train.rate, train.loss.l1, ids and 2 more"]
    # Unfinished work says so, and what it was begun for.
    told = reasons(tmp_path / "s", artifacts.new_manifest("states", config))
    assert told[0].startswith("s.previous-2: unfinished work, changed: train.rate, ")
    assert reasons(tmp_path / "s", artifacts.new_manifest("states", config)) == []


def test_a_setting_that_appears_or_goes_is_a_changed_one() -> None:
    assert changed_keys({"a": 1}, {"a": 1, "b": {"c": 2}}) == ["b"]
    assert changed_keys({"a": 1, "b": [1, {"c": 2}]}, {"b": [1, {"c": 3}]}) == ["b.1.c", "a"]
    assert changed_keys({"a": None}, {}) == ["a"]


def test_damage_and_parents_made_anew_are_told_as_reasons(tmp_path: Path) -> None:
    make(tmp_path / "prompts", kind="prompts")
    above = [artifacts.parent_of(tmp_path / "prompts", "prompts", tmp_path / "s")]
    made = make(tmp_path / "s", kind="answers", parents=above)
    file = tmp_path / "s" / "shards" / "a.txt"
    os.truncate(file, 2)
    told = reasons(tmp_path / "s", made)
    assert told == ["s.previous-1: damaged: shards/a.txt: expected 6 bytes, found 2 bytes"]
    make(tmp_path / "s", kind="answers", parents=above)
    make(tmp_path / "prompts", {"seed": 8}, kind="prompts")
    above = [artifacts.parent_of(tmp_path / "prompts", "prompts", tmp_path / "s")]
    told = reasons(tmp_path / "s", artifacts.new_manifest("answers", CONFIG, above))
    assert told == ["s.previous-2: made anew since: prompts"]
    make(tmp_path / "s", kind="answers", parents=above)
    (tmp_path / "s" / artifacts.MANIFEST).write_text("{torn")
    assert "damaged: manifest.json" in reasons(tmp_path / "s", made)[0]


def test_finished_work_is_never_written_over_even_with_the_same_fingerprint(tmp_path: Path) -> None:
    first = make(tmp_path / "s")
    os.truncate(tmp_path / "s" / "records.bin", 10)
    assert make(tmp_path / "s").files == first.files
    assert (tmp_path / "s.previous-1" / "records.bin").stat().st_size == 10


def test_old_schema_and_broken_manifests_of_ours_are_moved_aside_too(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"schema_version": 0}, {"files": 3}]
    for number, change in enumerate(changes, start=1):
        make(tmp_path / "s")
        edit(tmp_path / "s", partial(dict.update, **change))
        artifacts.begin(tmp_path / "s", artifacts.new_manifest("states", {"seed": number}))
        (tmp_path / "s" / artifacts.STAGE).unlink()
        assert (tmp_path / f"s.previous-{number}" / "records.bin").exists()


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "stage.json"])
def test_a_folder_that_dspark_did_not_write_is_refused_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"tool": "mine"}')
    with pytest.raises(ForeignArtifactError, match="did not write"):
        artifacts.begin(tmp_path / "mine", artifacts.new_manifest("states", CONFIG))
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == [name]


def test_a_link_to_another_disk_stays_and_its_folder_is_moved_aside_there(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (tmp_path / "s").symlink_to(big / "s")
    first = make(tmp_path / "s")
    second = make(tmp_path / "s", {"seed": 2})
    assert (tmp_path / "s").is_symlink()
    assert artifacts.read_manifest(big / "s") == second
    assert artifacts.read_manifest(big / "s.previous-1") == first


# --- complete, then sealed -----------------------------------------------------------------------


def worked(folder: Path) -> Manifest:
    """A begun stage whose work is complete but not sealed, with a working file beside it."""
    manifest = artifacts.new_manifest("answers", CONFIG)
    artifacts.begin(folder, manifest)
    artifacts.atomic_write(folder / "answers.jsonl", "all of them\n")
    artifacts.atomic_write(folder / "unfinished.jsonl", "line by line\n")
    artifacts.complete(folder, counts={"answers": 3}, line="3", working=["unfinished.jsonl"])
    return manifest


def test_complete_work_is_known_after_the_process_is_gone_and_only_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    manifest = worked(folder)
    artifacts.begin(folder, manifest)
    done = artifacts.completed(folder)
    assert done is not None
    assert (done.counts, done.line) == ({"answers": 3}, "3")
    sealed = artifacts.finish(folder, manifest)
    assert set(sealed.files) == {"answers.jsonl"}
    assert sorted(os.listdir(folder)) == ["answers.jsonl", artifacts.MANIFEST]


@pytest.mark.parametrize("change", ["shorter", "gone", "more"])
def test_files_changed_since_make_complete_work_incomplete(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "s"
    manifest = worked(folder)
    if change == "gone":
        (folder / "answers.jsonl").unlink()
    elif change == "shorter":
        os.truncate(folder / "answers.jsonl", 3)
    else:
        (folder / "another").write_text("x")
    artifacts.begin(folder, manifest)
    assert artifacts.completed(folder) is None


def test_leftovers_beside_a_manifest_are_swept_at_the_next_look(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    manifest = worked(folder)
    left = {n: (folder / n).read_bytes() for n in ("unfinished.jsonl", artifacts.STAGE)}
    sealed = artifacts.finish(folder, manifest)
    for name, content in left.items():
        (folder / name).write_bytes(content)
    assert artifacts.is_current(folder, sealed.fingerprint)
    assert sorted(os.listdir(folder)) == ["answers.jsonl", artifacts.MANIFEST]


def test_a_stage_record_cannot_have_a_file_outside_its_folder_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    folder = tmp_path / "s"
    manifest = worked(folder)
    with pytest.raises(ForeignArtifactError, match="inside the folder"):
        artifacts.complete(folder, counts={}, working=["../precious"])
    record = (folder / artifacts.STAGE).read_text()
    (folder / artifacts.STAGE).write_text(record.replace("unfinished.jsonl", "../precious"))
    with pytest.raises(ForeignArtifactError, match="inside the folder"):
        artifacts.finish(folder, manifest)
    assert (tmp_path / "precious").exists()


# --- attempts ------------------------------------------------------------------------------------

HERE = artifacts.Origin(
    command="dspark run a.yaml", commit="abc1234", versions={"python": "3"}, machine={"cores": 2}
)


def interrupted(folder: Path) -> None:
    with artifacts.attempt(folder, artifacts.Stopwatch(HERE)):
        time.sleep(0.05)
        raise KeyboardInterrupt


def test_every_attempt_counts_whatever_ended_it_and_the_fingerprint_does_not_know(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "s"
    manifest = artifacts.new_manifest("answers", CONFIG)
    artifacts.begin(folder, manifest)
    with pytest.raises(KeyboardInterrupt):
        interrupted(folder)
    artifacts.begin(folder, manifest)
    killed = artifacts.attempt(folder, artifacts.Stopwatch(HERE))
    killed.__enter__()  # and never left, as after kill -9
    artifacts.atomic_write(folder / "answers.jsonl", "x")
    later = (folder / artifacts.STAGE).stat().st_mtime + 7
    os.utime(folder / "answers.jsonl", (later, later))
    artifacts.begin(folder, manifest)
    there = HERE.model_copy(update={"commit": "def5678+dirty", "command": "dspark train a.yaml"})
    watch = artifacts.Stopwatch(there)
    with artifacts.attempt(folder, watch):
        made = artifacts.finish(folder, manifest, watch).made
    assert made is not None
    first, second, third = made.attempts
    assert [a.ended for a in made.attempts] == ["interrupted", "killed", "finished"]
    assert first.seconds >= 0.05
    assert second.seconds == pytest.approx(7, abs=0.5)
    assert made.seconds == pytest.approx(first.seconds + second.seconds + third.seconds, abs=0.02)
    assert (made.started, made.commit) == (first.started, "def5678+dirty")
    assert made.command == "dspark train a.yaml"
    assert artifacts.read_manifest(folder).made == made
    assert artifacts.read_manifest(folder).fingerprint == artifacts.fingerprint("answers", CONFIG)
    del killed


def test_loading_is_counted_apart(tmp_path: Path) -> None:
    loaded = [3.0]
    watch = artifacts.Stopwatch(HERE, lambda: loaded[0])
    loaded[0] = 3.25  # a quarter of a second of loading, in no time at all
    found = watch.attempt("finished")
    assert (found.loading, found.seconds) == (0.25, 0.0)


def test_a_stage_record_of_an_earlier_version_still_resumes(tmp_path: Path) -> None:
    manifest = artifacts.new_manifest("answers", CONFIG)
    folder = tmp_path / "s"
    folder.mkdir()
    old = {"tool": "dspark", "schema_version": 1, "fingerprint": manifest.fingerprint}
    (folder / artifacts.STAGE).write_text(json.dumps(old))
    (folder / "half").write_text("kept")
    artifacts.begin(folder, manifest)
    assert (folder / "half").read_text() == "kept"


# --- lineage -------------------------------------------------------------------------------------


def chain(root: Path) -> list[Manifest]:
    """prompts -> answers -> draft, and draft also straight from prompts."""
    prompts = make(root / "prompts", kind="prompts")
    above = [artifacts.parent_of(root / "prompts", "prompts", root / "answers")]
    answers = make(root / "answers", kind="answers", parents=above)
    above = [
        artifacts.parent_of(root / "answers", "answers", root / "draft"),
        artifacts.parent_of(root / "prompts", "prompts", root / "draft"),
    ]
    return [make(root / "draft", kind="draft", parents=above), answers, prompts]


def test_lineage_lists_each_ancestor_once_also_after_the_run_folder_moved(tmp_path: Path) -> None:
    made = chain(tmp_path / "run")
    assert made[0].parents[0].path == "../answers"
    (tmp_path / "run").rename(tmp_path / "moved")
    found = artifacts.lineage(tmp_path / "moved" / "draft")
    assert [manifest for _, manifest in found] == made
    assert [path.name for path, _ in found] == ["draft", "answers", "prompts"]


def test_lineage_reports_moved_and_replaced_parents_without_failing(tmp_path: Path) -> None:
    chain(tmp_path)
    make(tmp_path / "prompts", {"seed": 7}, kind="prompts")
    (tmp_path / "answers").rename(tmp_path / "elsewhere")
    problems = {p.name: m for p, m in artifacts.lineage(tmp_path / "draft")}
    assert isinstance(problems["draft"], Manifest)
    assert isinstance(problems["answers"], MissingArtifactError)
    assert isinstance(problems["prompts"], ForeignArtifactError)
    assert "made later" in str(problems["prompts"])


def test_a_parent_must_be_finished_and_of_its_kind(tmp_path: Path) -> None:
    make(tmp_path / "s")
    with pytest.raises(ForeignArtifactError):
        artifacts.parent_of(tmp_path / "s", "answers", tmp_path / "d")
    with pytest.raises(ArtifactError):
        artifacts.parent_of(tmp_path / "none", "answers", tmp_path / "d")
    os.truncate(tmp_path / "s" / "records.bin", 10)
    with pytest.raises(DamagedArtifactError, match=r"records\.bin"):
        artifacts.parent_of(tmp_path / "s", "states", tmp_path / "d")


def test_a_full_device_is_a_storage_error_that_says_so() -> None:
    with (
        pytest.raises(StorageError, match=r"No space left.*Free some space"),
        artifacts.storage_guard("/dev/full"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")
