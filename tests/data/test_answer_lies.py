"""Servers that are dead or do not tell the truth: each is found and named, over real HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.scripted_server import Reply, Seen, scripted
from data.answer_sets import answers_of, asked, section_of, served
from data.answering_server import CHATML, AnsweringServer, Spoil, by_script, byte_tokenizer
from dspark.errors import DataError, EndpointError

TOKENIZER = byte_tokenizer(CHATML)
PROMPTS = asked(*([f"question {n}"] for n in range(12)))
END = TOKENIZER.eos_token_id


def server_of(
    spoil: Spoil | None = None,
    answer: Callable[[str], str] = lambda text: "yes, " + text[-40:-30],
    **more: Any,
) -> AnsweringServer:
    return AnsweringServer(TOKENIZER, by_script(TOKENIZER, answer), spoil=spoil, **more)


def choice(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["choices"][0]


def set_reply(**values: Any) -> Spoil:
    return lambda reply, seen: reply | values


def set_choice(**values: Any) -> Spoil:
    def spoil(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
        choice(reply).update(values)
        return reply

    return spoil


def stripped_end(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
    choice(reply)["token_ids"] = choice(reply)["token_ids"][:-1]
    reply["usage"]["completion_tokens"] -= 1
    return reply


def other_template(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
    return reply | {"prompt_token_ids": [5, *reply["prompt_token_ids"]]}


def other_text(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
    choice(reply)["message"]["content"] = "Sorry, I cannot."
    return reply


def no_token(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
    choice(reply)["token_ids"][0] = 10**12
    return reply


LIES: dict[str, tuple[Spoil, str]] = {
    "no prompt ids": (set_reply(prompt_token_ids=None), "prompt_token_ids in the reply"),
    "no answer ids": (set_choice(token_ids=None), "token_ids in the reply"),
    "an empty prompt: everything would be trained on": (set_reply(prompt_token_ids=[]), "0 ids"),
    "another template": (other_template, "token mismatch"),
    "another model's name": (set_reply(model="cheaper"), "cheaper"),
    "text that is not of its ids": (other_text, "Sorry, I cannot"),
    "ids without their text": (set_choice(message={"content": ""}), "an empty answer"),
    "usage of other counts": (
        set_reply(usage={"prompt_tokens": 1, "completion_tokens": 3}),
        "3 gen",
    ),
    "a cut answer that is called whole": (stripped_end, "end-of-turn id"),
    "an id that is no token": (no_token, "1000000000000"),
    "more ids than asked": (set_choice(token_ids=[65] * 400), "mismatch"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found_at_the_first_reply_and_the_endpoint_named(
    name: str, tmp_path: Path
) -> None:
    spoil, found = LIES[name]
    with scripted(server_of(spoil)) as running:
        section = section_of(running.url, temperatures=(0.0,))
        with pytest.raises(EndpointError, match=found) as caught:
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
        assert running.url in caught.value.where
    assert not list((tmp_path / "shards").glob("*")) if (tmp_path / "shards").exists() else True


def test_an_endpoint_of_empty_answers_is_named_before_the_set_is_wasted(tmp_path: Path) -> None:
    server = server_of(answer=lambda text: "")
    with scripted(server) as running:
        section = section_of(running.url)
        with pytest.raises(EndpointError, match=r"\d of \d+ answers are empty"):
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
    assert server.answered < 12


def test_a_few_empty_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    server = server_of(answer=lambda text: "" if "question 3" in text else "yes")
    with scripted(server) as running:
        section = section_of(running.url)
        rows, report = answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
    assert len(rows) == 11
    assert report.dropped == {"empty": 1}


def test_one_liar_among_honest_endpoints_is_the_one_that_is_named(tmp_path: Path) -> None:
    with scripted(server_of()) as honest, scripted(server_of(other_text)) as liar:
        section = section_of(honest.url, liar.url)
        with pytest.raises(EndpointError) as caught:
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
        assert liar.url in caught.value.where
        assert honest.url not in caught.value.where


def test_a_model_exchanged_behind_its_name_is_found_at_the_end(tmp_path: Path) -> None:
    lengths = itertools.chain([2000], itertools.repeat(4000))
    server = server_of()

    def script(seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return Reply({"data": [{"id": "tiny", "max_model_len": next(lengths)}]})
        return server(seen)

    with scripted(script) as running:
        section = section_of(running.url)
        with pytest.raises(EndpointError, match="to the end"):
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)


def test_an_endpoint_that_dies_is_reported_and_its_share_done_by_the_other(tmp_path: Path) -> None:
    counter = itertools.count()

    def dies(reply: dict[str, Any], seen: Seen) -> Any:
        return reply if next(counter) < 2 else Reply("", cut=True)

    with scripted(server_of(dies)) as dying, scripted(server_of()) as other:
        section = section_of(dying.url, other.url)
        rows, report = answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
        assert list(report.lost_endpoints) == [dying.url]
    assert len(rows) == 12
    assert "was lost" in (tmp_path / "report.html").read_text()


def test_what_was_answered_before_all_endpoints_died_is_not_asked_again(tmp_path: Path) -> None:
    counter = itertools.count()

    def dies(reply: dict[str, Any], seen: Seen) -> Any:
        return reply if next(counter) < 5 else Reply("gone", status=500)

    with scripted(server_of(dies)) as running:
        section = section_of(running.url)
        with pytest.raises(EndpointError, match="gone"):
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path / "one")
    again = server_of()
    with scripted(again) as running:
        section = section_of(running.url)
        rows, _ = answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path / "one")
    assert again.answered == 12 - 5
    assert [row.prompt for row in rows] == [prompt.id for prompt in PROMPTS]


def test_truncation_is_counted_by_category_and_shown(tmp_path: Path) -> None:
    """Public data sets were a third truncated while their reports said none."""
    long = {f"question {n}<": "x" * 50 for n in (1, 4, 7)}
    server = server_of(answer=lambda text: next((a for q, a in long.items() if q in text), "ok"))
    with scripted(server) as running:
        section = section_of(running.url, max_new_tokens=20)
        rows, report = answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)
    assert report.finish_reasons == {"stop": 9, "length": 3}
    assert report.truncated == report.categories[0].truncated == 0.25
    cut = [row for row in rows if row.finish_reason == "length"]
    assert len(cut) == 3
    assert all(row.ids[-1] != END and row.trained == 20 for row in cut)
    assert report.trained == sum(row.trained for row in rows)
    assert report.coverage == report.trained / sum(len(row.ids) for row in rows)
    assert "25.0" in (tmp_path / "report.html").read_text()


def test_a_cut_answer_is_continued_by_the_server_from_its_own_ids(tmp_path: Path) -> None:
    # By script, what is written depends on the prompt: here, how much of the alphabet is there.
    def answer(text: str) -> str:
        begun = text.rpartition("assistant\n")[2]
        return "abcdefghijklmnopqrstuvwxyz"[len(begun) :]

    with scripted(server_of(answer=answer)) as running:
        section = section_of(running.url, max_new_tokens=10, on_length="continue")
        rows, report = answers_of(PROMPTS[:1], served(TOKENIZER, section), section, tmp_path)
        paths = [seen.path for seen in running.seen[1:-1]]
    assert paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert rows[0].messages[-1]["content"] == "abcdefghijklmnopqrstuvwxyz"
    assert (rows[0].trained, rows[0].ids[-1], report.finish_reasons) == (27, END, {"stop": 1})


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    server = server_of(answer=lambda text: "long answer")
    with scripted(server) as running:
        section = section_of(running.url, max_new_tokens=5, on_length="drop")
        with pytest.raises(DataError, match="covers 0 %"):
            answers_of(PROMPTS, served(TOKENIZER, section), section, tmp_path)


def test_a_turn_beyond_the_servers_context_is_not_asked(tmp_path: Path) -> None:
    server = server_of(length=100)
    prompts = asked(["short"], ["x" * 200], ["short again", "y" * 100])
    with scripted(server) as running:
        section = section_of(running.url, max_new_tokens=20)
        rows, report = answers_of(prompts, served(TOKENIZER, section), section, tmp_path)
    assert [row.prompt for row in rows] == [prompts[0].id, prompts[2].id]
    assert report.dropped == {"context": 1}
    assert report.later_turns_left == {"context": 1}


def test_a_server_that_hides_its_context_length_refuses_only_what_is_too_long(
    tmp_path: Path,
) -> None:
    def refuses(reply: dict[str, Any], seen: Seen) -> Any:
        if len(reply["prompt_token_ids"]) <= 60:
            return reply
        return Reply({"message": "This model's maximum context length is 60 tokens."}, status=400)

    prompts = asked(["short"], ["x" * 200])
    with scripted(server_of(refuses)) as running:
        section = section_of(running.url, max_new_tokens=20)
        rows, report = answers_of(prompts, served(TOKENIZER, section), section, tmp_path)
    assert len(rows) == 1
    assert report.dropped == {"context": 1}


@pytest.mark.parametrize("text", [" yes \n", "yes�", "é", "好"])
def test_trimmed_white_space_and_half_characters_are_no_lie(text: str, tmp_path: Path) -> None:
    def trims(reply: dict[str, Any], seen: Seen) -> dict[str, Any]:
        message = choice(reply)["message"]
        message["content"] = message["content"].strip()
        return reply

    with scripted(server_of(trims, answer=lambda _: text * 5)) as running:
        section = section_of(running.url, max_new_tokens=7)  # cuts within a character
        rows, _ = answers_of(PROMPTS[:2], served(TOKENIZER, section), section, tmp_path)
    assert all(row.trained == 7 for row in rows)
