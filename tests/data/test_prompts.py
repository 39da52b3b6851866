"""What is kept, what is dropped and why; nothing disappears without being counted."""

from __future__ import annotations

import json

import pytest

from dspark.config.recipe import PromptsSection
from dspark.data.prompt import make_prompt
from dspark.data.prompts import build_prompts, read_prompts, write_prompts
from dspark.errors import DataError, StorageError


def words(messages):
    return sum(len(m["content"].split()) for m in messages)


def rows_file(tmp_path, name, texts):
    path = tmp_path / f"{name}.jsonl"
    rows = [t if isinstance(t, dict) else {"prompt": t} for t in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "file", "path": str(path), "category": name}


def section(*sources, limit=50):
    return PromptsSection(
        sources=sources, workload=(sources[0]["category"],), max_prompt_tokens=limit
    )


def drops(report, number):
    return {(d.split, d.reason): d.count for d in report.sources[number].drops}


def test_clean_sources_pass_whole_training_first():
    words_source = {"kind": "word_problems", "category": "maths", "train": 40, "held_out": 10}
    prompts, report = build_prompts(section(words_source), words)
    assert [p.split for p in prompts] == ["train"] * 40 + ["held_out"] * 10
    assert report.kept("train") == 40
    assert report.kept("held_out") == 10
    assert report.dropped("train") == report.dropped("held_out") == 0


def test_duplicates_differ_only_in_case_and_white_space(tmp_path):
    texts = ["What is two?", "  what IS\n two?  ", "What is two ?"]
    source = rows_file(tmp_path, "a", texts) | {"train": 3}
    prompts, report = build_prompts(section(source), words)
    assert len(prompts) == 2
    assert drops(report, 0) == {("train", "duplicate"): 1}


def test_same_question_under_another_system_turn_is_no_duplicate(tmp_path):
    def row(system):
        roles = [("system", system), ("user", "same")]
        return {"messages": [{"role": r, "content": c} for r, c in roles]}

    source = rows_file(tmp_path, "a", [row("x"), row("y")]) | {"train": 2}
    assert len(build_prompts(section(source), words)[0]) == 2


def test_held_out_questions_leave_training_whatever_the_source_order_and_system_turn(tmp_path):
    shouted = {
        "messages": [
            {"role": "system", "content": "be loud"},
            {"role": "user", "content": "THE  secret"},
        ]
    }
    train = rows_file(tmp_path, "a", [shouted, "follow up", "fine"]) | {"train": 3}
    held = rows_file(tmp_path, "b", [{"turns": ["the secret", "Follow up"]}]) | {"held_out": 1}
    for sources in ((train, held), (held, train)):
        prompts, report = build_prompts(section(*sources), words)
        kept = [p.messages[-1]["content"] for p in prompts]
        assert kept == ["fine", "the secret"]
        assert drops(report, sources.index(train)) == {("train", "in_held_out"): 2}


def test_held_out_question_that_is_itself_too_long_still_leaves_training(tmp_path):
    long = "word " * 60
    train = rows_file(tmp_path, "a", [long, "fine"]) | {"train": 2}
    held = rows_file(tmp_path, "b", [long, "short"]) | {"held_out": 2}
    _, report = build_prompts(section(train, held), words)
    assert drops(report, 0) == {("train", "in_held_out"): 1}
    assert drops(report, 1) == {("held_out", "too_long"): 1}


def test_length_limit_is_inclusive_and_the_example_says_how_long(tmp_path):
    source = rows_file(tmp_path, "a", ["a b c", "a b c d", "a b c d e"]) | {"train": 3}
    prompts, report = build_prompts(section(source, limit=3), words)
    assert [p.messages[0]["content"] for p in prompts] == ["a b c"]
    (drop,) = report.sources[0].drops
    assert (drop.reason, drop.count) == ("too_long", 2)
    assert "tokens > 3" in drop.example


def test_made_is_kept_plus_dropped_everywhere(tmp_path):
    texts = ["a", "A", "word " * 60, "g", "h", "i", "g ", "a"]
    source = rows_file(tmp_path, "a", texts) | {"train": 5, "held_out": 3}
    other = {"kind": "word_problems", "category": "a", "train": 9, "held_out": 4}
    _, report = build_prompts(section(source, other), words)
    for part in report.sources:
        for split in ("train", "held_out"):
            dropped = sum(d.count for d in part.drops if d.split == split)
            assert part.made[split] == part.kept[split] + dropped
    assert report.kept("train") + report.dropped("train") == 14
    assert report.dropped("train") + report.dropped("held_out") >= 4


def test_category_that_loses_a_whole_split_is_an_error_with_reasons(tmp_path):
    fine = {"kind": "word_problems", "category": "maths", "train": 5, "held_out": 5}
    held = rows_file(tmp_path, "b", ["word " * 200]) | {"held_out": 1}
    with pytest.raises(DataError) as caught:
        build_prompts(section(fine, held, limit=90), words)
    assert caught.value.where == "prompts, category b"
    assert "some of 1 held_out" in caught.value.expected
    assert "1 too_long (first: 200 tokens > 90" in caught.value.found


def test_nothing_asked_for_is_an_error():
    with pytest.raises(DataError, match="0 in every source"):
        build_prompts(section({"kind": "word_problems", "category": "maths"}), words)


def test_written_prompts_read_back_equal(tmp_path):
    prompts = [
        make_prompt("train", "maths", ['two\u2028lines "quoted" é 漢 🙂']),
        make_prompt("held_out", "chat", ["one", "two"], system="brief"),
    ]
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, prompts)
    assert read_prompts(path) == prompts
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_writing_nothing_or_nowhere_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least one prompt"):
        write_prompts(tmp_path / "prompts.jsonl", [])
    prompt = make_prompt("train", "maths", ["x"])
    with pytest.raises(StorageError, match="No such file"):
        write_prompts(tmp_path / "absent" / "prompts.jsonl", [prompt])
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="taken"):
        write_prompts(tmp_path / "taken", [prompt])
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, "split"),
        ({"extra": 1}, "extra"),
        ({"messages": [{"role": "user", "content": ""}]}, r"turn 0 \(user\) is empty"),
        ({"messages": "x"}, "messages"),
        ({"later_turns": [""]}, "later turn 0 is empty"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path, change, message):
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, [make_prompt("train", "maths", ["x"])])
    row = make_prompt("train", "maths", ["y"]).model_dump(mode="json")
    with path.open("a") as file:
        file.write(json.dumps(row | change) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}, line 2"


def test_a_row_without_a_field_and_a_repeated_id_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "x", "split": "train", "category": "maths"}\n')
    with pytest.raises(DataError, match=r"line 1.*messages: Field required"):
        read_prompts(path)
    prompt = make_prompt("train", "maths", ["x"])
    write_prompts(path, [prompt, prompt])
    with pytest.raises(DataError, match=r"line 2.*already on line 1"):
        read_prompts(path)


def test_empty_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(DataError, match="no such file"):
        read_prompts(path)
    path.write_text("")
    with pytest.raises(DataError, match="an empty file"):
        read_prompts(path)
