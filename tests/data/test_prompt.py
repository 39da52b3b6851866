"""A Prompt cannot hold a conversation that a target could not answer."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dspark.data.prompt import Prompt, first_problem, make_prompt, tokenised_prompt


def turns(*roles):
    return [{"role": role, "content": "text"} for role in roles]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "either messages or input_ids"),
        (turns("user", "user"), "turn 1 is 'user', expected 'assistant'"),
        (turns("assistant"), "turn 0 is 'assistant', expected 'user'"),
        (turns("system", "assistant"), "turn 1 is 'assistant', expected 'user'"),
        (turns("user", "system", "user"), "turn 1 is 'system'"),
        (turns("system"), "last turn must be the user's"),
        (turns("user", "assistant"), "last turn must be the user's"),
        (turns("tool"), "role 'tool'"),
        ([{"role": "user", "content": " \n\t"}], r"turn 0 \(user\) is empty"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": "user"}], "not role and content"),
        ([{"role": "user", "content": "x", "name": "y"}], "not role and content"),
        ([{"role": "user", "content": 5}], "valid string"),
    ],
)
def test_unanswerable_conversations_are_refused(messages, message):
    with pytest.raises(ValidationError, match=message):
        Prompt(id="x", split="train", category="maths", messages=messages)


def test_system_turn_and_history_are_allowed():
    messages = turns("system", "user", "assistant", "user")
    prompt = Prompt(id="x", split="train", category="maths", messages=messages)
    assert prompt.messages == messages


@pytest.mark.parametrize("field", [{"split": "test"}, {"category": "Two words"}, {"id": ""}])
def test_other_fields_are_checked(field):
    sound = {"id": "x", "split": "train", "category": "maths", "messages": turns("user")}
    Prompt.model_validate(sound)
    with pytest.raises(ValidationError, match=next(iter(field))):
        Prompt.model_validate(sound | field)


def test_only_the_first_user_turn_is_asked_and_later_ones_are_kept():
    prompt = make_prompt("held_out", "chat", ["one", "two", "three"], system="be brief")
    assert [m["content"] for m in prompt.messages] == ["be brief", "one"]
    assert prompt.later_turns == ["two", "three"]


def test_ids_depend_on_everything_asked_and_on_nothing_else():
    # Pinned: a changed id would part answers and captured states from their prompts.
    same = {make_prompt("train", "chat", ["one"]).id for _ in range(2)}
    assert same == {"chat-train-a19ef8da5875d5bc"}
    others = {
        make_prompt("train", "chat", ["one "]).id,
        make_prompt("train", "chat", ["one", "two"]).id,
        make_prompt("train", "chat", ["one"], system="s").id,
        make_prompt("held_out", "chat", ["one"]).id,
        make_prompt("train", "code", ["one"]).id,
    }
    assert len(others | same) == 6


def test_tools_are_part_of_the_id_and_source_and_language_are_not():
    tool = {"type": "function", "function": {"name": "add"}}
    plain = make_prompt("train", "chat", ["one"], language="en", source="a, line 1")
    assert plain.id == "chat-train-a19ef8da5875d5bc"
    assert make_prompt("train", "chat", ["one"], tools=[tool]).id != plain.id


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2], [0], "one number for each of 2 ids, found 1"),
        ([1, 2], [1, 1], "everything"),
        ([1, 2], [0, 0], "nothing"),
        ([1, 2], [0, 2], "0 and 1 only"),
        ([-1, 2], [0, 1], "negative id"),
    ],
)
def test_token_ids_need_a_mask_that_marks_some_of_them(ids, mask, message):
    assert tokenised_prompt("train", "chat", [1, 2], [0, 1], "x").texts == []
    with pytest.raises(ValidationError, match=message):
        tokenised_prompt("train", "chat", ids, mask, "x")


def test_first_problem_is_short_and_names_the_field():
    with pytest.raises(ValidationError) as caught:
        make_prompt("train", "chat", [""])
    assert first_problem(caught.value) == "messages: turn 0 (user) is empty"
