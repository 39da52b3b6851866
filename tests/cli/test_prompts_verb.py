"""``dspark prompts`` as a user types it: with files by name, with a recipe of prompts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import dspark

ROOT = Path(__file__).parents[2]
EVAL = (
    "How many golf balls fit into a school bus if every seat is taken out and the doors stay shut"
)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    prompts = write(
        tmp_path / "in.jsonl",
        [
            {"prompt": "What is the capital of France?"},
            {"conversations": [{"from": "human", "value": "what is the capital  of france?"}]},
            {
                "messages": [
                    {"role": "user", "content": f"### Instruction:\n{EVAL}?\n### Response:"}
                ]
            },
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            {"unknown": 1},
        ],
    )
    return prompts, write(tmp_path / "eval.jsonl", [{"task_id": "bus", "prompt": EVAL}])


def test_files_without_a_usable_row_are_told_in_the_verbs_own_words(tmp_path: Path) -> None:
    rows = write(tmp_path / "in.jsonl", [{"unknown": 1}, {"question": "x"}])
    done = dspark("prompts", "--input", str(rows), "--out", str(tmp_path / "out"))
    told = " ".join(done.stderr.split())
    assert done.returncode == 1
    for word in ("messages", "conversations", "input_ids", "--input", "keys ['unknown']"):
        assert word in told
    assert "prompts.max_prompt_tokens" not in told
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n{"prompt": NaN}\n')
    done = dspark("prompts", "--input", str(rows), "--out", str(tmp_path / "out"))
    told = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "line 2" in told
    assert "NaN, which is not JSON" in told


def test_files_by_name_are_filtered_and_reported(files: tuple[Path, Path], tmp_path: Path) -> None:
    prompts, against = files
    out = tmp_path / "out"
    command = ["prompts", "--input", str(prompts), "--against", str(against), "--out", str(out)]
    done = dspark(*command)
    assert done.returncode == 0, done.stderr
    assert "contamination" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert (report["rows_in"], report["rows_out"]) == (5, 1)
    dropped = {step["step"]: step["dropped"] for step in report["funnel"] if step["dropped"]}
    assert dropped == {"misshapen": 1, "image": 1, "contamination": 1, "duplicate": 1}
    (hit,) = list(json.loads((out / "contamination.json").read_text()))
    assert (hit["set"], hit["item"]) == ("eval.jsonl", "bus")
    assert "golf balls" in hit["ngram"]
    assert (out / "report.html").is_file()
    assert (out / "manifest.json").is_file()
    again = dspark(*command, "--json")
    assert json.loads(again.stdout) == report
    assert "finished before" in dspark(*command).stdout


def test_changed_input_is_noticed_under_the_same_name(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, against = files
    out = tmp_path / "out"
    command = ["prompts", "--input", str(prompts), "--against", str(against), "--out", str(out)]
    assert dspark(*command).returncode == 0
    write(against, [{"prompt": "nothing of that kind"}])
    done = dspark(*command, "--json")
    assert json.loads(done.stdout)["rows_out"] == 2
    assert (tmp_path / "out.previous-1" / "manifest.json").is_file()


def test_traffic_is_scrubbed_and_the_report_says_what_is_stored(tmp_path: Path) -> None:
    row = {"request": {"messages": [{"role": "user", "content": "I am at bob@example.com, hi"}]}}
    log = write(tmp_path / "log.jsonl", [row])
    for scrub, kept in ((None, "<EMAIL>"), ("none", "bob@example.com")):
        out = tmp_path / f"out-{scrub}"
        extra = ["--scrub", scrub] if scrub else []
        done = dspark("prompts", "--traffic", str(log), "--out", str(out), *extra)
        assert done.returncode == 0, done.stderr
        (shard,) = (out / "shards").iterdir()
        assert kept in shard.read_text()
        stored = json.loads((out / "report.json").read_text())["stored"]
        assert ("WITHOUT any scrubbing" in stored) == (scrub == "none")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--input FILE --out DIR"),
        (["--out", "x"], "--input FILE --out DIR"),
        (["--input", "README.md"], "no --out"),
        (["recipe.yaml", "--input", "README.md"], "not both"),
        (["recipe.yaml", "--against", "README.md"], "not both"),
        (["--input", "nowhere.jsonl", "--out", "x"], "no such file or folder: 'nowhere.jsonl'"),
        (["--traffic", "nowhere.jsonl", "--out", "x"], "no such file or folder: 'nowhere.jsonl'"),
        (["--against", "nowhere.jsonl"], "no such file or folder: 'nowhere.jsonl'"),
        (["--input", "README.md", "--out", "x", "--scrub", "none"], "--scrub with --traffic"),
        (["--traffic", "README.md", "--out", "x", "--scrub", "a b"], "module:function"),
        (["recipes/data/kimi-k3-pool.yaml"], "prompts.sources.3.dataset"),
        (["recipes/data/offline-pool.yaml", "prompts.rows=-1"], "prompts.rows"),
        (["recipes/data/offline-pool.yaml", "train.epochs=1"], "train"),
    ],
)
def test_wrong_use_is_refused_in_four_parts(arguments: list[str], says: str) -> None:
    done = dspark("prompts", *arguments, cwd=ROOT)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_offline_recipe_is_planned_and_made(tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "data" / "offline-pool.yaml")
    smaller = [
        f"output={tmp_path / 'run'}",
        "prompts.sources.0.train=60",
        "prompts.sources.1.train=60",
    ]
    plan = dspark("prompts", recipe, *smaller, "--plan")
    assert plan.returncode == 0, plan.stderr
    assert "nothing was run" in plan.stdout
    assert not (tmp_path / "run").exists()
    done = dspark("prompts", recipe, *smaller)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "prompts" / "report.json").read_text())
    kept = {c["category"]: c["rows_out"] for c in report["categories"]}
    assert kept == {"extraction": 60 + 20, "maths": 30 + 20}
