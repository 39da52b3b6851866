"""Every stage, cut by real signals at its work, at its sealing and behind its manifest.

After each cut nothing half-written can be read, the same command goes on where it was, and the
artifact at the end is the one an uninterrupted run makes, byte for byte (times excepted).
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cut_run import Cutter
from rich.console import Console

from conftest import write_recipe
from dspark.artifacts import MANIFEST, Manifest, read_manifest, verify
from dspark.cli.console import Screen
from dspark.cli.context import RunContext
from dspark.cli.plan import plan_of
from dspark.config.load import load_recipe
from dspark.errors import MissingArtifactError

KINDS = ("prompts", "answers", "states", "draft", "bench")
VERBS = {"answers": "regenerate", "states": "capture", "draft": "train"}
SMALL = ("prompts.sources.0.train=24", "train.epochs=6", "train.checkpoint_every=4",
         "prompts.sources.0.held_out=4", "bench.max_new_tokens=24")  # fmt: skip
# Stage -> call at which its work is cut, calls of an uninterrupted run, calls left after the cut.
WORK = {
    "prompts": (1, 1, 1),
    "answers": (10, 24, 15),
    "states": (10, 24, 15),
    "draft": (23, 36, 16),  # cut behind step 22, whose last checkpoint is that of step 20
    "bench": (9, 12, 6),  # T=0 whole (4 prompts, 2 of them twice); T=1: 2 timed ones cut
}
INT, KILL = signal.SIGINT, signal.SIGKILL
# Calls left after an interrupt, where it is met by more than dying: training saves the step it is at.
LEFT_BY_INT = {"draft": 14}


@pytest.fixture(scope="module")
def cutter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cutter]:
    found = Cutter(tmp_path_factory.mktemp("cutter"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(cutter: Cutter, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that nobody cut; its recipe lies beside it."""
    root = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(root, tiny_target)
    code, out, counts = cutter.run("run", str(recipe), *SMALL)
    assert code == 0, out
    assert {kind: counts[kind] for kind in KINDS} == {k: WORK[k][1] for k in KINDS}
    return root / "run"


def until(whole: Path, kind: str, folder: Path) -> Path:
    """A copy of the run with the stages before ``kind`` only."""
    for before in KINDS[: KINDS.index(kind)]:
        shutil.copytree(whole / before, folder / before)
    return folder


def command(whole: Path, kind: str, folder: Path) -> list[str]:
    return [VERBS.get(kind, kind), str(whole.parent / "tiny.yaml"), *SMALL, f"output={folder}"]


def timeless(value: Any) -> Any:
    """JSON without anything a clock has told."""
    if isinstance(value, dict):
        left_out = {"seconds", "tokens_per_second", "speedup"}
        return {k: timeless(v) for k, v in value.items() if k not in left_out}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def same_content(one: Path, other: Path) -> Manifest:
    """Both are whole and hold the same files; returns the manifest of the first."""
    mine, theirs = verify(one, deep=True), verify(other, deep=True)
    assert mine.files.keys() == theirs.files.keys()
    assert mine.counts == theirs.counts
    for name in mine.files:
        if name in {"training.json", "bench.json", "results.json"}:
            files = [json.loads((folder / name).read_text()) for folder in (one, other)]
            assert timeless(files[0]) == timeless(files[1]), name
        else:
            assert mine.files[name] == theirs.files[name], name
    assert not [
        p.name for p in one.iterdir() if p.name not in {*theirs.files, MANIFEST} and p.is_file()
    ]
    return mine


def unreadable(folder: Path) -> None:
    with pytest.raises(MissingArtifactError, match="interrupted"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("first", "second"), [(KILL, INT), pytest.param(INT, KILL, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_cut_at_work_and_again_while_sealed_makes_what_it_would_have_made(
    cutter: Cutter, whole: Path, tmp_path: Path, kind: str, first: int, second: int
) -> None:
    at, _, left = WORK[kind]
    if first == INT:
        left = LEFT_BY_INT.get(kind, left)
    folder = until(whole, kind, tmp_path) / kind
    again = command(whole, kind, tmp_path)
    for number, place, more in ((first, (kind, at), None), (second, ("sealing", 1), left)):
        code, out, counts = cutter.run(*again, at=place, number=number)
        assert code == (130 if number == INT else -KILL)
        if number == INT:
            assert "resume" in out
            assert "Traceback" not in out
        unreadable(folder)
        assert more is None or counts[kind] == more, "work was done twice"
    # The plan has told what lies there now, working files and all.
    need = plan_of(RunContext(load_recipe(again[1], again[2:]), "", Screen(Console(quiet=True))))
    lies_there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert lies_there <= need[kind].disk + need[kind].working
    code, out, counts = cutter.run(*again)
    assert code == 0, out
    assert counts[kind] == 0, "sealing needed the work again"
    made = same_content(folder, whole / kind).made
    assert made is not None
    ends = {KILL: "killed", INT: "interrupted"}
    assert [a.ended for a in made.attempts] == [ends[first], ends[second], "finished"]
    assert made.seconds == pytest.approx(sum(a.seconds for a in made.attempts), abs=0.02)
    assert made.seconds > made.attempts[-1].seconds
    assert f"output={tmp_path}" in made.command


@pytest.mark.parametrize("number", [KILL, pytest.param(INT, marks=pytest.mark.slow)])
def test_working_files_left_beside_a_manifest_are_swept_at_the_next_look(
    cutter: Cutter, whole: Path, tmp_path: Path, number: int
) -> None:
    folder = until(whole, "answers", tmp_path) / "answers"
    again = command(whole, "answers", tmp_path)
    cutter.run(*again, at=("sealed", 1), number=number)
    assert (folder / "unfinished.jsonl").exists()
    assert "unfinished.jsonl" not in read_manifest(folder, "answers").files
    code, out, counts = cutter.run(*again)
    assert code == 0, out
    assert "finished before" in out
    assert counts["answers"] == 0
    same_content(folder, whole / "answers")


@pytest.mark.parametrize("number", [KILL, INT])
def test_a_report_cut_half_way_is_written_from_what_the_stages_recorded(
    cutter: Cutter, whole: Path, tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in ("summary.json", "lineage.json", "report.html"):
        (folder / name).unlink()
    again = ["run", str(whole.parent / "tiny.yaml"), *SMALL, f"output={folder}"]
    code, _, _ = cutter.run(*again, at=("report", 1), number=number)
    assert code == (130 if number == INT else -KILL)
    assert not (folder / "report.html").exists()
    code, out, _ = cutter.run(*again)
    assert code == 0, out
    for name in ("summary.json", "lineage.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert (folder / "report.html").exists()


def test_a_bench_of_another_machine_is_measured_again(
    cutter: Cutter, whole: Path, tmp_path: Path
) -> None:
    folder = until(whole, "bench", tmp_path) / "bench"
    again = command(whole, "bench", tmp_path)
    cutter.run(*again, at=("bench", 9), number=KILL)
    log = folder / "unfinished.jsonl"
    head, *rows = log.read_text().splitlines()
    assert len(rows) == 8
    elsewhere = {"machine": {**json.loads(head)["machine"], "device": "a faster one"}}
    log.write_text("\n".join([json.dumps(elsewhere), *rows]) + "\n")
    code, out, counts = cutter.run(*again)
    assert code == 0, out
    assert "another machine" in out
    assert counts["bench"] == WORK["bench"][1]


@pytest.mark.parametrize("number", [KILL, INT])
def test_a_bench_of_a_draft_with_out_goes_on_where_it_was_cut(
    cutter: Cutter, whole: Path, tmp_path: Path, number: int
) -> None:
    prompts = str(whole.parent / "prompts.jsonl")
    bench = ["bench", str(whole / "draft"), "--prompts", prompts, "bench.prompts_per_category=4"]
    bench += ["bench.repeats=2", "bench.speed_prompts=2", "bench.max_new_tokens=24"]
    straight, out = tmp_path / "straight.json", tmp_path / "cut.json"
    code, said, counts = cutter.run(*bench, "--out", str(straight))
    assert code == 0, said
    assert counts["bench"] == WORK["bench"][1]
    again = [*bench, "--out", str(out)]
    code, said, _ = cutter.run(*again, at=("bench", WORK["bench"][0]), number=number)
    assert code == (130 if number == INT else -KILL)
    assert ("Run the same command again to resume" in said) == (number == INT)
    assert not out.exists()
    code, said, counts = cutter.run(*again, "bench.max_new_tokens=20")
    assert code == 0, said
    assert counts["bench"] == WORK["bench"][1], "other settings must not take up these decodings"
    cutter.run(*again, at=("bench", WORK["bench"][0]), number=number)
    code, said, counts = cutter.run(*again)
    assert code == 0, said
    assert "taken up" in said
    assert counts["bench"] == WORK["bench"][2]
    assert timeless(json.loads(out.read_text())) == timeless(json.loads(straight.read_text()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.json", "straight.json"]


def test_an_interrupted_bench_of_a_draft_without_out_says_that_nothing_was_kept(
    cutter: Cutter, whole: Path
) -> None:
    bench = ["bench", str(whole / "draft"), "bench.max_new_tokens=8", "bench.repeats=1"]
    code, said, _ = cutter.run(*bench, at=("bench", 1), number=INT)
    assert code == 130
    assert "with --out FILE the same command would resume" in said
