"""Training prompts against the bench's own tasks: one setting, from where the bench takes its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.bench.tasks.task import task_named
from dspark.cli.console import Screen
from dspark.cli.prompts import make_data
from dspark.cli.task_items import task_items
from dspark.config.recipe import DataRecipe
from dspark.data.prompt_report import PromptReport
from dspark.errors import ConfigError, DataError

QUESTION = (
    "A ship of {n} sailors leaves the harbour of Lisbon at dawn on day {n} and meets a merchant who "
    "carries {n} barrels of salt; how many barrels does each sailor get"
)


def benchmark(folder: Path, count: int) -> Path:
    """A made file of the size that the definition of GSM8K promises."""
    folder.mkdir(exist_ok=True)
    words = [
        f"word{n} " * 3 + f"{QUESTION.format(n=n)} {['deck', 'mast', 'sail', 'rope'][n % 4]} {n}?"
        for n in range(count)
    ]
    rows = [{"question": text, "answer": f"#### {n}"} for n, text in enumerate(words)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe_of(tmp_path: Path, rows: list[str], **settings: Any) -> DataRecipe:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    return DataRecipe.model_validate(
        {
            "name": "x",
            "output": str(tmp_path / "out"),
            "prompts": {
                "workload": ["chat"],
                "sources": [
                    {"kind": "file", "path": str(path), "category": "chat", "train": "all"}
                ],
                "filters": {
                    "contamination": {"benchmarks": [], "template_items": 2000, **settings}
                },
            },
        }
    )


def made(recipe: DataRecipe) -> PromptReport:
    return make_data(recipe, Path(recipe.output), Screen(), quiet=True)


def test_a_prompt_from_a_task_is_dropped_and_the_task_named(tmp_path: Path) -> None:
    data = benchmark(tmp_path / "data", task_named("gsm8k").rule.count)
    taken = QUESTION.format(n=77)
    rows = [f"[INST] {taken.upper()} ? [/INST]", "What is the capital of Portugal, and since when?"]
    report = made(recipe_of(tmp_path, rows, tasks=["gsm8k"], data=str(data)))
    assert report.dropped("contamination") == 1
    assert report.contamination.sets == {"gsm8k": 1319}
    assert {hit.set for hit in report.contamination.first_hits} == {"gsm8k"}


def test_all_takes_what_is_at_hand_and_tells_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = benchmark(tmp_path / "data", task_named("gsm8k").rule.count)
    report = made(recipe_of(tmp_path, ["What is a fox, and why?"], tasks="all", data=str(data)))
    assert report.contamination.sets["gsm8k"] == 1319
    assert "livecodebench" in report.contamination.not_installed
    assert any("livecodebench" in note for note in report.notes)


@pytest.mark.parametrize(
    ("settings", "error", "found"),
    [
        ({"tasks": ["gsm9k"]}, ConfigError, "gsm8k"),
        ({"tasks": ["gsm8k"], "data": "{tmp}/none"}, DataError, "nothing there"),
        ({"tasks": ["gsm8k"], "data": "{tmp}/short"}, DataError, "1319"),
    ],
)
def test_a_named_task_that_is_not_what_it_should_be_is_refused(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], found: str
) -> None:
    benchmark(tmp_path / "short", 5)
    filled = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(error, match=found):
        task_items(recipe_of(tmp_path, ["x y z"], **filled).prompts)


def test_another_benchmark_file_makes_the_prompts_anew(tmp_path: Path) -> None:
    data = benchmark(tmp_path / "data", task_named("gsm8k").rule.count)
    recipe = recipe_of(
        tmp_path, [QUESTION.format(n=3), "What is a fox?"], tasks=["gsm8k"], data=str(data)
    )
    assert made(recipe).dropped("contamination") == 1
    text = (data / "gsm8k.jsonl").read_text().replace("Lisbon", "Porto")
    (data / "gsm8k.jsonl").write_text(text.replace("merchant who carries", "baker who sells"))
    assert made(recipe).dropped("contamination") == 0
    assert (tmp_path / "out.previous-1").exists()
