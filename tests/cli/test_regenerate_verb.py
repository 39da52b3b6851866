"""The command itself: prompts, answers through servers, and how the rows look."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from client.scripted_server import scripted
from conftest import write_prompts
from data.answering_server import AnsweringServer, by_engine
from dspark.artifacts import verify
from dspark.checkpoint.target import load_target
from dspark.cli.main import entry
from dspark.config.recipe import TargetSection
from dspark.data.shards import read_prompts
from dspark.hidden.answers import read_answers

DATA = """\
name: pool
output: {output}
tokenizer: {{source: {target}}}
prompts:
  workload: [sums]
  max_prompt_tokens: 64
  sources: [{{kind: file, path: {prompts}, category: sums, train: 12, held_out: 2}}]
regenerate:
  max_new_tokens: 48
  endpoints: [{{url: "{url}", concurrency: 3}}]
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dspark(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The real command, in this process: a new one would load torch each time."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            entry(list(arguments))
        return Done(int(left.value.code or 0), *capsys.readouterr())

    return call


def server_on(target: Path) -> AnsweringServer:
    loaded = load_target(TargetSection(source=str(target), max_context=256))
    return AnsweringServer(loaded.tokenizer, by_engine(loaded.build(()), frozenset(loaded.end_ids)))


def test_a_recipe_without_a_target_is_answered_by_its_servers(
    dspark: Callable[..., Done], tiny_target: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 30)
    with scripted(server_on(tiny_target)) as running:
        recipe = tmp_path / "pool.yaml"
        values = {"output": tmp_path / "pool", "target": tiny_target, "url": running.url}
        recipe.write_text(DATA.format(prompts=prompts, **values))
        early = dspark("regenerate", str(recipe))
        assert early.returncode == 1
        assert "dspark prompts" in early.stderr
        assert dspark("prompts", str(recipe)).returncode == 0
        plan = dspark("regenerate", str(recipe), "--plan")
        assert plan.returncode == 0
        assert "576" in plan.stdout  # 12 prompts of at most 48 new tokens
        assert not running.seen
        done = dspark("regenerate", str(recipe))
        assert done.returncode == 0, done.stderr
        again = dspark("regenerate", str(recipe), "regenerate.endpoints.0.concurrency=1")
        assert "finished before" in again.stdout
    answers = tmp_path / "pool" / "answers"
    found = verify(answers, "answers", deep=True)
    assert found.counts["prompts"] == found.counts["answers"] == 12
    rows = read_answers(answers)
    assert {row.generation.server for row in rows if row.generation} == {running.url}
    report = json.loads((answers / "report.json").read_text())
    assert report["categories"][0]["trained"] == sum(row.trained for row in rows)
    shown = dspark("inspect", str(answers), "--rows", "2", "--seed", "1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("<assistant>") == 2
    assert dspark("inspect", str(answers), "--rows", "2", "--seed", "1").stdout == shown.stdout


def test_a_run_is_answered_by_a_server_and_trains_on_its_ids(
    dspark: Callable[..., Done], tiny_target: Path, tiny_recipe: Path
) -> None:
    small = ["prompts.sources.0.train=16", "regenerate.max_new_tokens=32"]
    with scripted(server_on(tiny_target)) as running:
        small.append(f'regenerate.endpoints=[{{url: "{running.url}"}}]')
        for verb in ("prompts", "regenerate", "capture"):
            done = dspark(verb, str(tiny_recipe), *small)
            assert done.returncode == 0, done.stderr
    rows = read_answers(tiny_recipe.parent / "run" / "answers")
    assert len(rows) == 16
    states = verify(tiny_recipe.parent / "run" / "states", "states")
    assert states.counts["tokens"] == sum(len(row.ids) for row in rows)


def test_a_target_without_prompts_writes_them_itself(
    dspark: Callable[..., Done], tiny_target: Path, tiny_recipe: Path
) -> None:
    source = "{kind: self_instruct, category: sums, train: 6, held_out: 2, max_tokens: 40}"
    own = [f"prompts.sources=[{source}]", "prompts.filters.contamination=null"]
    done = dspark("prompts", str(tiny_recipe), *own)
    assert done.returncode == 0, done.stderr
    folder = tiny_recipe.parent / "run" / "prompts"
    assert verify(folder, "prompts").counts == {"train": 6, "held_out": 2, "rows_in": 8}
    assert not list(folder.glob("self-instruct*"))
    texts = {prompt.messages[0]["content"] for prompt in read_prompts(folder, "train")}
    # Its training text is "NAME has A and gets B".
    assert sum(text[:3] in {"tom", "mia", "ben"} for text in texts) >= 4


@pytest.mark.parametrize(
    ("change", "code", "found"),
    [
        (("{url}", "http://127.0.0.1:9"), 1, "http://127.0.0.1:9"),
        (("regenerate:\n  max_new_tokens: 48\n  endpoints: [{{url: \"{url}\", concurrency: 3}}]\n", ""), 2, "endpoints"),
        (("concurrency: 3", "api_key_env: DSPARK_NO_SUCH_KEY"), 2, "DSPARK_NO_SUCH_KEY"),
    ],
)  # fmt: skip
def test_nobody_who_answers_is_named_before_any_work(
    dspark: Callable[..., Done],
    tiny_target: Path,
    tmp_path: Path,
    change: tuple[str, str],
    code: int,
    found: str,
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 30)
    recipe = tmp_path / "pool.yaml"
    values = {"output": tmp_path / "pool", "target": tiny_target, "url": "http://127.0.0.1:8"}
    recipe.write_text(DATA.replace(*change).format(prompts=prompts, **values))
    assert dspark("prompts", str(recipe)).returncode == 0
    done = dspark("regenerate", str(recipe), *(["regenerate.attempts=1"] if code == 1 else []))
    assert done.returncode == code
    assert found in done.stderr
