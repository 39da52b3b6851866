"""``dspark doctor`` as a user runs it: exit status, JSON, and errors that name the option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark.checkpoint.target import load_target
from dspark.cli import doctor_target
from dspark.cli.doctor_target import Request
from dspark.cli.doctor_vllm import vllm_engine
from dspark.cli.main import entry
from dspark.config.recipe import TargetSection
from dspark.doctor.rules import ENGINES


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        entry(["doctor", *arguments])
    return int(left.value.code or 0)


def test_a_sound_draft_exits_with_zero_and_a_broken_one_says_cause_and_mend(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tiny_run / "draft")) == 0
    assert "sound" in capsys.readouterr().out
    broken = tmp_path / "draft"
    shutil.copytree(tiny_run / "draft", broken)
    (broken / "manifest.json").unlink()
    raw = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**raw, "rope_interleave": True}))
    assert run(str(broken)) == 1
    told = capsys.readouterr().out
    assert "rules.rope_interleave" in told
    assert "neox" in told
    assert "Delete rope_interleave" in told
    assert run(str(broken), "--engine", "vllm") == 0, "vLLM reads no rope_interleave"


def test_json_holds_every_check_and_nothing_else_is_printed(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tiny_run / "draft"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sound"] is True
    assert told["engines"] == list(ENGINES)
    assert sum(told["counts"].values()) == len(told["checks"])
    assert {c["status"] for c in told["checks"]} <= {"pass", "skip"}
    assert any(row["ids"] == [1, 2, 3] for row in told["layer_ids"].values())


def test_an_unknown_engine_and_an_absent_target_are_named(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tiny_run / "draft"), "--engine", "tgi") == 2
    assert "--engine" in capsys.readouterr().err
    assert run(str(tiny_run / "draft"), "--target", "/nowhere/at/all") == 1
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_folder_without_a_draft_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path)) == 1
    assert "files.config" in capsys.readouterr().out


def test_a_run_is_examined_on_its_workload_which_the_expected_length_is_of(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(tiny_run, tmp_path / "run")
    [shard] = (root / "prompts" / "shards").glob("held_out-*.jsonl")
    other = json.loads(shard.read_text().splitlines()[0])
    other |= {"id": "chat-1", "category": "chat"}
    other["messages"] = [{"role": "user", "content": "Write a poem."}]
    shard.write_text(json.dumps(other) + "\n" + shard.read_text())
    monkeypatch.setattr(doctor_target, "prompt_ids", lambda _tokenizer, messages: messages)
    request = Request(root / "draft", ENGINES, None, None)
    chosen = doctor_target.probe_prompts(request, SimpleNamespace(tokenizer=None))
    assert len(chosen) == 12
    assert not [m for m in chosen if "poem" in m[0]["content"]]


@pytest.mark.parametrize("engine", [(), ("--engine", "vllm")])
def test_a_prompt_that_leaves_no_room_is_named_before_any_engine_starts(
    tiny_run: Path,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: tuple[str, ...],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": "1 + 2" * times}) for times in (1, 200)]
    prompts.write_text("\n".join(lines))
    draft = str(tiny_run / "draft")
    assert run(draft, "--target", str(tiny_target), "--prompts", str(prompts), *engine) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "in prompt 2" in told
    assert "at most 255 tokens" in told
    assert "--prompts FILE" in told


def test_without_vllm_the_live_checks_say_that_our_own_engine_ran_them(
    tiny_run: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", str(tmp_path / "nowhere"))
    target = load_target(TargetSection(source=str(tiny_target), max_context=256))
    raw = json.loads((tiny_run / "draft" / "config.json").read_text())
    engine, check = vllm_engine(tiny_run / "draft", raw, target, (0, 1, 2), tmp_path)
    assert engine is None
    assert (check.id, check.status) == ("live.engine", "skip")
    assert "dspark's own engine" in check.found
    assert "make vllm" in check.found
