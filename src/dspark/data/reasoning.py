"""Reasoning inside an answer: finding it in the text, and giving it back to the template.

A server that parses reasoning returns it apart; the embedded engine and many servers return it as
it was written, between marks. Templates read it as ``reasoning_content`` or ``reasoning``: both are
given. What a template does with the reasoning of earlier answers (most drop it) is its own affair,
and the setting ``history_reasoning`` says whether it gets any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dspark.config.answers import HistoryReasoning

MARKS = (
    ("<think>", "</think>"),
    ("◁think▷", "◁/think▷"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
)
"""Opening and closing marks of reasoning, as models write them."""


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning, answer) of a text as it was written; reasoning is None where there is none.

    The opening mark may stand in the prompt; an answer that was cut while it reasoned is all
    reasoning.
    """
    for opening, closing in MARKS:
        begins = text.lstrip().startswith(opening)
        if closing in text:
            reasoning, _, answer = text.partition(closing)
            return reasoning.lstrip().removeprefix(opening).strip("\n"), answer.lstrip("\n")
        if begins:
            return text.lstrip().removeprefix(opening).strip("\n"), ""
    return None, text


def assistant_turn(
    content: str, reasoning: str | None, tool_calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """An answer as a message of the finished row."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def as_history(message: dict[str, Any], written: str, policy: HistoryReasoning) -> dict[str, Any]:
    """An earlier answer as the next turn is asked with it.

    Args:
        message: of :func:`assistant_turn`.
        written: the answer's own text, marks and all, without the end-of-turn token.
        policy: see :class:`dspark.config.answers.RegenerateSection`.
    """
    if policy == "inline":
        return {"role": "assistant", "content": written}
    past = {key: value for key, value in message.items() if key != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    if policy == "template" and reasoning is not None:
        past |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return past


def for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: arguments of tool calls as objects, not as text."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
