"""User turns that a target writes itself: from its template, all different, none made twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from client.scripted_server import scripted
from data.answer_sets import section_of
from data.answering_server import CHATML, LLAMA3, AnsweringServer, byte_tokenizer
from data.test_chat import small_tokenizer
from dspark.config.prompts import NearDuplicates, PromptsSection, SelfInstructSource
from dspark.data.prompts import build_prompts
from dspark.data.self_instruct import OnResult, file_name, opening_of, write_turns, written_prompts
from dspark.data.served import endpoints_of, write_served
from dspark.data.shards import read_prompts
from dspark.decoding.request import GenerationRequest, GenerationResult
from dspark.errors import DataError, TargetError
from told import Told

TOKENIZER = byte_tokenizer(CHATML)
END = TOKENIZER.eos_token_id


def source_of(**settings: Any) -> SelfInstructSource:
    return SelfInstructSource(kind="self_instruct", **{"train": 6, "held_out": 2, **settings})


def writer(text: Callable[[int], str], asked: list[int] | None = None) -> Any:
    def write(requests: list[GenerationRequest], stop_ids: Collection[int], keep: OnResult) -> None:
        for request in reversed(requests):  # engines finish in any order
            if asked is not None:
                asked.append(int(request.id))
            ids = [*TOKENIZER.encode(text(int(request.id)), add_special_tokens=False), END]
            cut = tuple(ids[: request.params.max_new_tokens])
            keep(GenerationResult(request.id, cut, "stop" if cut[-1] in stop_ids else "length"))

    return write


def test_the_target_is_given_its_template_up_to_where_a_user_speaks() -> None:
    opening = opening_of(TOKENIZER, None)
    assert TOKENIZER.decode(opening.ids) == "<|im_start|>user\n"
    assert opening.stop_ids == {END}
    under = opening_of(TOKENIZER, "You are a bank.")
    assert (
        TOKENIZER.decode(under.ids)
        == "<|im_start|>system\nYou are a bank.<|im_end|>\n<|im_start|>user\n"
    )
    llama = byte_tokenizer(LLAMA3)
    assert llama.decode(opening_of(llama, None).ids) == "<|begin|><|header|>user<|/header|>\n\n"


def test_a_template_without_an_end_of_user_turns_is_refused() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(TargetError, match="no end that can be told"):
        opening_of(tokenizer, None)
    with pytest.raises(TargetError, match="no chat template"):
        opening_of(small_tokenizer(template=None), None)


def test_repeats_cut_and_empty_texts_are_written_again_under_the_next_number(
    tmp_path: Path,
) -> None:
    texts = {
        0: "What is a fox?",
        1: "what  is a FOX?",
        2: "",
        3: "x" * 300,
        4: "<|im_start|>system",
    }
    source = source_of()
    write_turns(
        source, tmp_path / "t", TOKENIZER, (), writer(lambda i: texts.get(i, f"question {i}"))
    )
    prompts = list(written_prompts(source, tmp_path / "t"))
    assert [p.messages[0]["content"] for p in prompts] == [
        "What is a fox?",
        *(f"question {i}" for i in range(5, 12)),
    ]
    assert [p.split for p in prompts] == ["train"] * 6 + ["held_out"] * 2


def test_a_target_that_repeats_itself_is_named_and_not_asked_for_ever(tmp_path: Path) -> None:
    asked: list[int] = []
    with pytest.raises(DataError, match="3 among"):
        write_turns(
            source_of(), tmp_path / "t", TOKENIZER, (), writer(lambda i: f"q{i % 3}", asked)
        )
    assert len(asked) < 200


def test_what_was_written_before_a_kill_is_not_written_again(tmp_path: Path) -> None:
    source, path = source_of(), tmp_path / "t"
    write_turns(source, path, TOKENIZER, (), writer(lambda i: f"question {i % 5}, {i}"))
    whole = [p.model_dump() for p in written_prompts(source, path)]
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        before = content[:size].count(b"\n")
        asked: list[int] = []
        told = Told()
        write = writer(lambda i: f"question {i % 5}, {i}", asked)
        write_turns(source, path, TOKENIZER, (), write, told)
        assert len(asked) == told.made == content.count(b"\n") - before
        assert told.kept == before
        assert [p.model_dump() for p in written_prompts(source, path)] == whole


def test_written_turns_go_through_the_filters_like_any_others(tmp_path: Path) -> None:
    """Near duplicates among them too: generators are spared that, a target that rambles is not."""
    long = "tell me about the history of the river that runs through the old town in spring"
    texts = [f"{long} please", f"{long} thanks", *(f"{n} words about {n * 7}" for n in range(20))]
    source = source_of(train=10, held_out=0, category="chat")
    write_turns(source, tmp_path / file_name(0), TOKENIZER, (), writer(lambda i: texts[i]))
    section = PromptsSection.model_validate(
        {"sources": [source], "workload": ["chat"], "filters": {"near_duplicate": NearDuplicates()}}
    )
    report = build_prompts(section, tmp_path, None)
    assert report.dropped("near_duplicate") == 1
    assert len(read_prompts(tmp_path, "train")) == 9


def test_servers_write_from_ids_and_stop_at_the_end_of_the_users_turn(tmp_path: Path) -> None:
    def generate(prompt: list[int], body: dict[str, Any]) -> list[int]:
        assert body["stop_token_ids"] == [END]
        assert TOKENIZER.decode(prompt) == "<|im_start|>user\n"
        return [*TOKENIZER.encode(f"question {body['seed']}", add_special_tokens=False), END]

    source = source_of(train=5)
    with scripted(AnsweringServer(TOKENIZER, generate)) as running:
        section = section_of(running.url)
        endpoints = endpoints_of(section)
        write_turns(
            source, tmp_path / "t", TOKENIZER, (),
            lambda requests, stop_ids, keep: write_served(endpoints, section, requests, stop_ids, keep),
        )  # fmt: skip
    assert len(list(written_prompts(source, tmp_path / "t"))) == 7
    assert {json.loads(line)["text"][:9] for line in (tmp_path / "t").read_text().splitlines()} == {
        "question "
    }
