"""Rows of every published shape become the same conversation, or a reason why not."""

from __future__ import annotations

import json

import pytest

from dspark.data.shapes import Unusable, recognise

ASKED = ["What is two plus two?", "And three?"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ASKED[0]},
    {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"},
    {"role": "user", "content": ASKED[1]},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def sharegpt(*pairs):
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]},
        {"messages": [{**CHAT[0], "role": "developer"}, *CHAT[1:]], "source": "x"},
        sharegpt(("system", "Be brief."), ("human", ASKED[0]), ("gpt", "Four."), ("human", ASKED[1])),
        {**sharegpt(("human", ASKED[0]), ("gpt", "4"), ("human", ASKED[1])), "system": "Be brief."},
        {"conversations": CHAT},
        {"input": CHAT, "output": "Seven."},
        {"prompt": CHAT},
        {"prompt": ASKED[0], "messages": CHAT, "prompt_id": "7"},
    ],
)  # fmt: skip
def test_a_conversation_is_the_same_in_every_shape(row):
    talk = recognise(row)
    assert (talk.system, talk.turns, talk.tools) == ("Be brief.", ASKED, [])


def test_single_turn_shapes():
    assert recognise({"prompt": "x"}).turns == ["x"]
    assert recognise({"inputs": "x", "targets": "y", "language_code": "zsm"}).language == "zsm"
    assert recognise({"turns": ["x", "y"]}).turns == ["x", "y"]
    assert recognise({"instruction": "Sort", "input": "b a", "output": "a b"}).turns == [
        "Sort\n\nb a"
    ]
    assert recognise({"instruction": "Sort", "input": "", "output": ""}).turns == ["Sort"]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_are_kept_and_turns_after_a_tool_result_are_not_asked(tools):
    talk = recognise(
        {
            "tools": tools,
            "messages": [
                {"role": "user", "content": "add 1 and 2"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "3"},
                {"role": "user", "content": "and 4?"},
            ],
        }
    )
    assert talk.tools == [TOOL]
    assert talk.turns == ["add 1 and 2"]


def test_token_ids_are_taken_with_their_mask_only():
    talk = recognise({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert (talk.ids, talk.mask, talk.turns) == ([5, 6, 7], [0, 1, 1], [])
    for mask in ([1, 1, 1], [0, 0, 0], [0, 1], [0, 1, 2], None):
        with pytest.raises(Unusable) as caught:
            recognise({"input_ids": [5, 6, 7], "loss_mask": mask})
        assert caught.value.reason == "misshapen"


@pytest.mark.parametrize(
    ("row", "reason", "says"),
    [
        ({"question": "x"}, "misshapen", "keys ['question']"),
        ({"prompt": None}, "misshapen", "keys"),
        ({"prompt": "x", "turns": ["y"]}, "misshapen", "turns and prompt differ"),
        ({"prompt": 5}, "misshapen", "found 5"),
        ({"turns": "x"}, "misshapen", "turns: a list of texts"),
        ({"turns": ["x", 1]}, "misshapen", "turns: a list of texts"),
        ({"messages": {"role": "user"}}, "misshapen", "at least one turn"),
        ({"messages": ["hi"]}, "misshapen", "found 'hi'"),
        ({"messages": [{"role": "user"}]}, "misshapen", "content: a text; found None"),
        ({"messages": [{"content": "x"}]}, "misshapen", "role: a text"),
        ({"prompt": "\ud800"}, "misshapen", "surrogate"),
        ({"prompt": "x", "tools": "[{"}, None, ""),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[{"}, "misshapen", "tools"),
        ({"prompt": " \n"}, "empty", "user turn 0 is empty"),
        ({"turns": []}, "empty", "turns"),
        ({"turns": ["x", ""]}, "empty", "user turn 1"),
        ({"messages": []}, "empty", "at least one turn"),
        (sharegpt(("human", "")), "empty", "user turn 0"),
        (sharegpt(("gpt", "x"), ("human", "y")), "roles", "turn 0 is 'assistant'"),
        (sharegpt(("human", "x"), ("human", "y")), "roles", "turn 1 is 'user'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "roles", "no user turn"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "roles", "wizard"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, "roles", "'tool'"),
        ({"prompt": "x", "images": ["a.png"]}, "image", "column images"),
        ({"prompt": "What is in <image>?"}, "image", "<image>"),
        ({"prompt": "<|vision_start|>"}, "image", "vision"),
        ({"prompt": "see data:image/png;base64,AAAA"}, "image", "data:image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "image", "input_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "x"}]}]}, "image", "image_url"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_has_a_reason(row, reason, says):
    if reason is None:
        recognise(row)
        return
    with pytest.raises(Unusable) as caught:
        recognise(row)
    assert caught.value.reason == reason
    assert says in str(caught.value)


def test_empty_media_columns_and_ordinary_brackets_are_no_media():
    row = {"prompt": "if a < b [image processing] > c, say 'base64'", "images": [], "audio": None}
    assert recognise(row).turns == [row["prompt"]]
