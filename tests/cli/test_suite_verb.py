"""``dspark bench --suite``, ``compare`` and ``leaderboard`` as commands, on the tiny trained pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.scripted_server import Reply, Seen, scripted
from dspark.bench.figures.comparison import Comparison
from dspark.bench.figures.schema import SuiteResults
from dspark.cli.main import entry

CARD = [
    ["GSM8K", 3.96, 4.90],
    ["HumanEval", 3.45, 4.07],
    ["MT-Bench", 2.81, 3.10],
    ["AIME", 2.45, 2.76],
]
SMALL = ["prompts=3", "max_tokens=24", "warm_up=0"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in this process: exit status, stdout and stderr."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            entry(list(arguments))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the right length whose questions the tiny target knows."""
    folder = tmp_path_factory.mktemp("data")
    names = ("tom", "mia", "ben")
    rows = [
        {"turns": [f"{names[i % 3]} has {1 + i % 9} and gets {1 + i // 9 % 9}"], "n": i}
        for i in range(257)
    ]
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [
        {"problem": f"{names[i % 3]} has {i % 9} and gets 2", "answer": str(i % 9 + 2)}
        for i in range(500)
    ]
    task = folder / "math500.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in problems))
    return folder


def test_a_suite_of_tasks_on_our_engine(
    tiny_run: Path, data: Path, tmp_path: Path, run: Run
) -> None:
    out, page = tmp_path / "own.json", tmp_path / "own.html"
    code, shown, err = run("bench", str(tiny_run / "draft"), "--task", "mbpp", "--data", str(data),
                           "--out", str(out), "--page", str(page), *SMALL)  # fmt: skip
    assert code == 0, err
    assert "MBPP (sanitized)" in shown
    assert "3 of 256" in shown
    results = SuiteResults.model_validate_json(out.read_text())
    cold, warm = results.arms
    assert (cold.temperature, warm.temperature, warm.top_p) == (0, 1, 0.95)
    assert cold.source == "engine"
    assert cold.acceptance is not None
    assert cold.acceptance.length is not None
    assert cold.acceptance.length > 1
    assert cold.acceptance.interval is not None
    assert cold.by_position
    assert results.draft["weights_sha256"]
    assert results.stack["template_hash"]
    assert (tmp_path / results.answers).is_file()
    assert "<svg" in page.read_text()


def test_the_same_command_goes_on_where_it_was_cut(
    tiny_run: Path, data: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "own.json"
    command = ["bench", str(tiny_run / "draft"), "--task", "mbpp", "--data", str(data), "--out",
               str(out), *SMALL]  # fmt: skip
    assert run(*command)[0] == 0
    first = SuiteResults.model_validate_json(out.read_text())
    answers = tmp_path / "own.answers.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:3]))
    code, _, err = run(*command)
    assert code == 0
    assert "2 answers of an earlier process" in err
    again = SuiteResults.model_validate_json(out.read_text())
    assert [p.digests for a in again.arms for p in a.prompts] == [
        p.digests for a in first.arms for p in a.prompts
    ]
    code, _, err = run(*command, "seed=5")
    assert code == 1
    assert "another settings" in err


def test_results_are_compared_and_equal_ones_are_called_so(
    tiny_run: Path, data: Path, tmp_path: Path, run: Run
) -> None:
    for name in ("a", "b"):
        code, _, err = run("bench", str(tiny_run / "draft"), "--task", "mbpp", "--data", str(data),
                           "--out", str(tmp_path / f"{name}.json"), "temperatures=[0]", *SMALL)  # fmt: skip
        assert code == 0, err
    code, shown, err = run("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    assert code == 0, err
    found = json.loads(shown)
    assert found["ratio_of_means"] == found["mean_of_ratios"] == 1
    assert found["pairs"][0]["identity"][0]["same"] == 3
    assert found["stack_differences"] == []
    assert "No difference" in found["overall"][0]["verdict"]


def test_two_drafts_are_measured_interleaved_with_a_plain_arm(
    tiny_run: Path, data: Path, tmp_path: Path, run: Run
) -> None:
    other = tmp_path / "worse"
    shutil.copytree(tiny_run / "draft", other)
    _spoil(other / "model.safetensors")
    code, shown, err = run("compare", str(tiny_run / "draft"), str(other), "--no-draft", "--task",
                           "mbpp", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL)  # fmt: skip
    assert code == 0, err
    found = Comparison.model_validate_json((tmp_path / "out/comparison.json").read_text())
    cold = next(p for p in found.pairs if p.temperature == 0)
    assert cold.a is not None
    assert cold.b is not None
    assert cold.a > cold.b
    assert [(i.same, i.of) for i in cold.identity] == [(3, 3)] * 3, "A, B and plain, at T = 0"
    assert {f.name for f in (tmp_path / "out").glob("*.json")} == {
        "comparison.json", "draft.json", "worse.json", "no-draft.json",
    }  # fmt: skip
    assert "ratio of means" in shown
    assert (tmp_path / "out/comparison.html").is_file()


def _spoil(path: Path) -> None:
    """A draft whose last projection is noise: it proposes nonsense."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(path)
    torch.manual_seed(0)
    for name in state:
        if name.startswith("layers.") and name.endswith("proj.weight"):
            state[name] = torch.randn_like(state[name])
    save_file(state, path, metadata={"format": "pt"})


def test_a_published_table_gives_both_averages(tmp_path: Path, run: Run) -> None:
    table = tmp_path / "table.json"
    rows = [{"benchmark": b, "a": x, "b": y} for b, x, y in CARD]
    table.write_text(json.dumps({"rows": rows}))
    code, shown, _ = run("compare", "--from-table", str(table), "--json")
    assert code == 0
    found = json.loads(shown)
    assert round(100 * found["ratio_of_means"], 1) == 85.4
    assert round(100 * found["mean_of_ratios"], 1) == 86.2
    code, shown, _ = run("compare", "--from-table", str(table))
    assert "85.4 %" in shown
    assert "86.2 %" in shown


@pytest.mark.parametrize("content", ['{"rows": 3}', '{"rows": [{"benchmark": "x"}]}', "[]", "{"])
def test_a_damaged_table_is_refused(tmp_path: Path, run: Run, content: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(content)
    code, _, err = run("compare", "--from-table", str(table))
    assert code in {1, 2}
    assert "what to do" in err


def test_a_server_is_measured_by_its_url(data: Path, tmp_path: Path, run: Run) -> None:
    told = {"acceptance": {"steps": 2, "drafted": 6, "admitted": 6, "accepted": 3}}

    def script(seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return Reply({"data": [{"id": "m", "owned_by": "somebody", "max_model_len": 4096}]})
        if seen.path != "/v1/chat/completions":
            return Reply({}, status=404)
        piece = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 6}
        return Reply(pieces=[{"model": "m", "choices": [piece]},
                             {"model": "m", "choices": [], "usage": usage, "dspark": told}])  # fmt: skip

    with scripted(script) as running:
        code, shown, err = run("bench", "--base-url", running.url, "--task", "mbpp", "--data",
                               str(data), "--json", "concurrency=2", *SMALL)  # fmt: skip
    assert code == 0, err
    found = SuiteResults.model_validate_json(shown)
    assert found.stack["engine"] == "somebody"
    assert found.stack["context"] == 4096
    assert found.arms[0].source == "dspark"
    assert found.arms[0].acceptance is not None
    assert found.arms[0].acceptance.length == 2.5


def test_argmax_drafts_above_zero_are_measured_and_said(
    tiny_run: Path, data: Path, run: Run
) -> None:
    code, shown, err = run("bench", str(tiny_run / "draft"), "--task", "mbpp", "--data", str(data),
                           "--json", "temperatures=[1]", "draft_sample_method=greedy",
                           "verification=standard", *SMALL)  # fmt: skip
    assert code == 0, err
    found = SuiteResults.model_validate_json(shown)
    assert found.stack["draft_sample_method"] == "greedy"
    assert found.arms[0].acceptance is not None
    assert any(text.startswith("Drafts are argmax") for text in found.notices)


def test_a_server_that_is_not_there_is_named(data: Path, run: Run) -> None:
    code, _, err = run("bench", "--base-url", "http://127.0.0.1:9", "--task", "mbpp", "--data",
                       str(data), "tries=1")  # fmt: skip
    assert code == 1
    assert "127.0.0.1:9" in err


def test_long_prompts_are_asked_as_far_as_the_context_goes(
    tiny_run: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, err = run("bench", str(tiny_run / "draft"), "--long", "--json")
    assert code == 1, shown
    assert "context of 256 tokens" in err


def test_missing_data_stops_a_suite_unless_it_may_be_skipped(
    tiny_run: Path, data: Path, run: Run
) -> None:
    draft = str(tiny_run / "draft")
    code, _, err = run("bench", draft, "--suite", "seed14", "--data", str(data), "--plan")
    assert code == 1
    assert "task gsm8k" in err
    code, _, err = run("bench", draft, "--suite", "seed14", "--data", str(data), "--plan",
                       "skip_missing=true")  # fmt: skip
    assert code == 0
    assert "not run" in err
    assert "math500" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench"], "one thing to measure"),
        (["bench", "a", "b"], "one thing to measure"),
        (["bench", "a.yaml", "--suite", "quick"], "a draft folder"),
        (["bench", __file__, "--data", "."], "--data with --suite"),
        (["bench", "--base-url", "http://127.0.0.1:9", "--suite", "slow"], "quick"),
        (["bench", "--base-url", "http://127.0.0.1:9", "speed=1"], "one of temperatures"),
        (["bench", "--base-url", "http://127.0.0.1:9", "concurrency=0"], "concurrency"),
        (["bench", "--base-url", "http://127.0.0.1:9", "verification=block"], "with a server"),
        (["compare", "a"], "two things"),
        (["compare", "a", "http://127.0.0.1:9"], "two draft folders"),
        (["compare", "http://a:1", "http://b:1", "--no-draft"], "--reference"),
    ],
)
def test_what_does_not_go_together_is_refused(run: Run, arguments: list[str], told: str) -> None:
    code, _, err = run(*arguments)
    assert code in {1, 2}
    assert told.lower() in " ".join(err.split()).lower()


def test_the_leaderboard_holds_measured_rows_and_is_checked(
    tiny_run: Path, data: Path, tmp_path: Path, run: Run
) -> None:
    folder, page = tmp_path / "results", tmp_path / "benchmarks.md"
    folder.mkdir()
    (folder / "other.json").write_text('{"speed": 1}')
    run("bench", str(tiny_run / "draft"), "--task", "mbpp", "--data", str(data), "--out",
        str(folder / "tiny.json"), "temperatures=[0]", *SMALL)  # fmt: skip
    assert run("leaderboard", str(folder), "--out", str(page))[0] == 0
    text = page.read_text()
    assert "| MBPP (sanitized) |" in text
    assert "other.json" not in text
    assert run("leaderboard", str(folder), "--out", str(page), "--check")[0] == 0
    page.write_text(text + "by hand")
    assert run("leaderboard", str(folder), "--out", str(page), "--check")[0] == 1


def test_formulas_of_the_users_file_are_graded(tiny_run: Path, data: Path, run: Run) -> None:
    pytest.importorskip("math_verify")
    code, shown, err = run("bench", str(tiny_run / "draft"), "--task", "math500", "--data",
                           str(data), "--json", "temperatures=[0]", "prompts=2", "max_tokens=60")  # fmt: skip
    assert code == 0, err
    quality: Any = json.loads(shown)["arms"][0]["quality"]
    assert quality["graded"] == 2
    assert quality["right"] + quality["unreadable"] <= 2
