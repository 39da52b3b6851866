"""Benchmarks as data: what they promise, and that fewer prompts or placeholders never pass."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dspark.bench.tasks.long import LENGTHS, MOST_TOKENS, long_questions
from dspark.bench.tasks.questions import Question, chosen_of, questions_of, spread
from dspark.bench.tasks.task import Rule, suite_named, suites, task_named, tasks
from dspark.cli.task_rows import load_questions
from dspark.errors import ConfigError, DataError

SEED14 = {
    "gsm8k": 1319, "humaneval": 164, "mbpp": 256, "speed_coding": 80, "speed_multilingual": 80,
    "speed_rag": 80, "math500": 500, "speed_low_entropy": 512, "swe_bench_pro": 128, "aa_lcr": 100,
    "mt_bench": 80, "speed_qa": 80, "speed_writing": 80, "aime2026": 30,
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns_file(folder: Path, name: str, count: int) -> Path:
    return write_rows(folder / name, [{"turns": [f"question {i}"]} for i in range(count)])


def test_the_fourteen_benchmarks_of_the_cards_have_their_published_counts() -> None:
    suite = suite_named("seed14")
    assert {name: task_named(name).rule.count for name in suite.tasks} == SEED14


def test_every_definition_says_what_a_stranger_needs_to_repeat_it() -> None:
    for task in tasks().values():
        assert task.rule.text
        assert task.licence
        assert task.how_to_get
        assert task.max_tokens > 0
    assert task_named("mt_bench").turns == 2
    assert task_named("speed_low_entropy_302").rule.count == 302
    assert len(suites()["paper9"].tasks) == 9


def test_the_hash_follows_what_decides_prompts_and_not_the_prose() -> None:
    task = task_named("gsm8k")
    assert task.hash == task.model_copy(update={"notes": "other", "title": "other"}).hash
    assert task.hash != task.model_copy(update={"max_tokens": 7}).hash


def test_an_unknown_task_or_suite_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="gsm8k"):
        task_named("gsm9k")
    with pytest.raises(ConfigError, match="quick"):
        suite_named("slow")


def test_the_quick_suite_needs_no_network_and_no_file() -> None:
    for name in suite_named("quick").tasks:
        task = task_named(name)
        questions, source = load_questions(task, None)
        assert len(questions) == task.rule.count
        assert source.startswith(("package", "generator"))


def test_mt_bench_asks_both_turns_in_eight_categories() -> None:
    questions, _ = load_questions(task_named("mt_bench"), None)
    assert {len(q.turns) for q in questions} == {2}
    assert len({q.category for q in questions}) == 8
    assert len({q.category for q in spread(questions, 8)}) == 8


def test_a_file_of_turns_in_the_users_folder_comes_first(tmp_path: Path) -> None:
    turns_file(tmp_path, "mbpp.jsonl", 257)
    questions, source = load_questions(task_named("mbpp"), tmp_path)
    assert len(questions) == 256
    assert questions[-1].turns == ("question 255",)
    assert source.startswith("file mbpp.jsonl")


@pytest.mark.parametrize("count", [255, 256, 258])
def test_another_number_of_rows_is_refused_and_never_used(tmp_path: Path, count: int) -> None:
    turns_file(tmp_path, "mbpp.jsonl", count)
    with pytest.raises(DataError, match="257 rows") as refused:
        load_questions(task_named("mbpp"), tmp_path)
    assert "--data" in refused.value.fix


def test_without_any_source_the_error_says_how_to_get_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        load_questions(task_named("speed_coding"), tmp_path)
    assert "prepare_data.py" in refused.value.fix
    assert "speed_qualitative.jsonl" in refused.value.found


def test_a_placeholder_in_place_of_a_text_is_refused(tmp_path: Path) -> None:
    hole = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{"turns": [f"q {i}"], "category": "coding"} for i in range(79)]
    rows.append({"turns": [hole], "category": "coding"})
    write_rows(tmp_path / "speed_qualitative.jsonl", rows)
    with pytest.raises(DataError, match="placeholder"):
        load_questions(task_named("speed_coding"), tmp_path)


def test_rows_are_chosen_by_the_field_the_rule_names(tmp_path: Path) -> None:
    rows = [
        {"turns": [f"q {i}"], "category": ["coding", "writing"][i % 2], "question_id": f"n{i}"}
        for i in range(160)
    ]
    write_rows(tmp_path / "speed_qualitative.jsonl", rows)
    questions, _ = load_questions(task_named("speed_writing"), tmp_path)
    assert len(questions) == 80
    assert questions[0].id == "speed_writing/n1"


def test_the_302_variant_takes_the_rows_that_ship_whole(tmp_path: Path) -> None:
    hole = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [
        {"turns": [hole if i < 210 else f"q {i}"], "category": "low_entropy"} for i in range(512)
    ]
    write_rows(tmp_path / "speed_throughput_8k.jsonl", rows)
    questions, _ = load_questions(task_named("speed_low_entropy_302"), tmp_path)
    assert len(questions) == 302
    with pytest.raises(DataError, match="placeholder"):
        load_questions(task_named("speed_low_entropy"), tmp_path)


def test_a_seeded_choice_depends_on_ids_alone() -> None:
    asked = [Question("t", f"t/{i}", "c", (f"q{i}",)) for i in range(50)]
    rule = Rule(available=50, count=10, select="seeded", text="ten")
    chosen = chosen_of(rule, asked)
    assert {q.id for q in chosen_of(rule, asked[::-1])} == {q.id for q in chosen}
    assert chosen == sorted(chosen, key=asked.index)
    other = chosen_of(rule.model_copy(update={"seed": 1}), asked)
    assert {q.id for q in other} != {q.id for q in chosen}


def test_formats_take_braces_and_backslashes_as_they_are() -> None:
    task = task_named("math500").model_copy(update={"rule": Rule(available=1, count=1, text="one")})
    (question,) = questions_of(task, [("row 1", {"problem": "Find {x}.", "answer": "2"})])
    assert question.turns[0].startswith("Find {x}.\nPlease reason")
    assert question.turns[0].endswith("\\boxed{}.")
    assert question.check == {"answer": "2"}


def test_rows_of_one_id_are_refused() -> None:
    task = task_named("humaneval").model_copy(
        update={"rule": Rule(available=2, count=2, text="two")}
    )
    rows = [("row", {"task_id": "a", "prompt": "def f(): pass"})] * 2
    with pytest.raises(DataError, match="twice"):
        questions_of(task, rows)


def lcr_files(folder: Path, names: str = "one.txt;two.txt") -> str:
    with zipfile.ZipFile(folder / "AA-LCR_extracted-text.zip", "w") as packed:
        packed.writestr("lcr/Law/set1/one.txt", "first text")
        packed.writestr("lcr/Law/set1/two.txt", "second text")
    header = "question_id,document_category,document_set_id,data_source_filenames,question,answer"
    rows = [f'{i},Law,set1,{names},"What is {i}?",yes' for i in range(100)]
    (folder / "AA-LCR_Dataset.csv").write_text("\n".join([header, *rows]) + "\n")
    data = (folder / "AA-LCR_extracted-text.zip").read_bytes()
    return hashlib.sha256(data).hexdigest()


def test_documents_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    sha = lcr_files(tmp_path, "two.txt;one.txt")
    task = task_named("aa_lcr")
    source = task.sources[0].model_copy(update={"archive_sha256": sha})
    questions, _ = load_questions(task.model_copy(update={"sources": (source,)}), tmp_path)
    assert len(questions) == 100
    text = questions[3].turns[0]
    assert "BEGIN DOCUMENT 1:\nsecond text\nEND DOCUMENT 1" in text
    assert text.index("second text") < text.index("first text") < text.index("What is 3?")


def test_an_archive_of_another_hash_or_without_a_document_is_refused(tmp_path: Path) -> None:
    sha = lcr_files(tmp_path, "one.txt;gone.txt")
    task = task_named("aa_lcr")
    with pytest.raises(DataError, match="sha256"):
        load_questions(task, tmp_path)
    source = task.sources[0].model_copy(update={"archive_sha256": sha})
    with pytest.raises(DataError, match=r"gone\.txt"):
        load_questions(task.model_copy(update={"sources": (source,)}), tmp_path)


@pytest.mark.parametrize("length", LENGTHS[:2])
def test_a_long_prompt_and_its_answer_fit_the_length_and_nearly_fill_it(length: int) -> None:
    def count(text: str) -> int:
        return len(text.split()) + 12

    questions = long_questions(length, count)
    assert len({q.key for q in questions}) == 5
    for question in questions:
        tokens = count(question.turns[0])
        assert 0.85 * length < tokens + MOST_TOKENS < length
