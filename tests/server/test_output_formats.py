"""JSON schemas, choices and tool calls: valid whatever the target is, streamed or whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.serving import MODEL, Served, chat


def test_json_schemas_and_choices_are_always_followed(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    }
    accepted = 0
    for seed in range(6):
        done = served.client.chat.completions.create(
            model=MODEL, messages=chat(str(seed)), temperature=seed % 2, seed=seed, max_tokens=400,
            response_format={
                "type": "json_schema", "json_schema": {"name": "thing", "schema": schema}
            },
            extra_body={"return_acceptance": True},
        )  # fmt: skip
        assert done.choices[0].finish_reason == "stop"
        thing = json.loads(done.choices[0].message.content)
        assert set(thing) == {"name", "size", "kind"}
        assert len(thing["name"]) <= 5
        assert 0 <= thing["size"] <= 99
        accepted += done.dspark["acceptance"]["accepted"]
    assert accepted > 3, "drafts go on under a grammar"
    chosen = served.client.completions.create(
        model=MODEL, prompt="x", max_tokens=50, n=4, seed=1,
        extra_body={"structured_outputs": {"choice": ["yes or no", "nö \"q\""]}},
    )  # fmt: skip
    assert {c.text for c in chosen.choices} <= {"yes or no", 'nö "q"'}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_forced_tool_calls_are_valid(served: Served, choice: Any, stream: bool) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "model": MODEL, "messages": chat(), "seed": seed, "max_tokens": 200,
            "tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False,
        }  # fmt: skip
        if stream:
            calls: list[list[str]] = []
            for chunk in served.client.chat.completions.create(stream=True, **asked):
                for part in chunk.choices[0].delta.tool_calls or []:
                    if part.index == len(calls):
                        calls.append([part.function.name, ""])
                    calls[part.index][1] += part.function.arguments
                reason = chunk.choices[0].finish_reason
        else:
            done = served.client.chat.completions.create(**asked).choices[0]
            calls = [[c.function.name, c.function.arguments] for c in done.message.tool_calls]
            reason = done.finish_reason
            assert done.message.content is None
        assert reason == "tool_calls"
        ((name, arguments),) = calls
        assert name in ("weather", "time")
        found = json.loads(arguments)
        assert found == {} if name == "time" else 1 <= found["days"] <= 9


def test_tools_reach_the_template_and_calls_may_be_sent_back(served: Served) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    plain = served.client.chat.completions.create(messages=chat(), **asked)
    shown = served.client.chat.completions.create(messages=chat(), tools=[WEATHER], **asked)
    hidden = served.client.chat.completions.create(
        messages=chat(), tools=[WEATHER], tool_choice="none", **asked
    )
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"days": 2}'},
    }
    turns = [*chat(), {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c1", "content": "rain"}]  # fmt: skip
    back = served.client.chat.completions.create(messages=turns, tools=[WEATHER], **asked)
    assert back.usage.prompt_tokens > shown.usage.prompt_tokens + 20
