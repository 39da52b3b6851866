"""Tool calls: shown through the target's template, forced by a grammar, or found in the text.

A *forced* call (``tool_choice`` ``required`` or a name) is generated under a JSON grammar made of
the tools' own schemas, so it is valid by construction whatever the target learnt. With ``auto`` the
target decides, in the notation its template shows. The notation known here is Hermes' (Qwen,
SmolLM and many others): ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``. A block that
is not a call of a tool that was offered stays text; nothing is guessed.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.decoding.params import Grammar
from dspark.server.protocol import ChatRequest, Message, NamedTool, Tool
from dspark.server.sampling import json_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY = {"type": "object"}
Mode = Literal["text", "auto", "named", "required"]


@dataclass(frozen=True)
class Call:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolPlan:
    """How the tools of a request are treated. ``shown`` go to the template."""

    mode: Mode
    name: str = ""
    shown: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.shown)


def plan_tools(body: ChatRequest, template: str) -> ToolPlan:
    """What to do with the tools of ``body`` under a chat template."""
    tools = body.tools or []
    if not tools or body.tool_choice == "none":
        return ToolPlan("text")
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        schema = next(_schema(tool) for tool in tools if tool.function.name == name)
        return ToolPlan("named", name, shown, json_grammar(schema))
    if body.tool_choice == "required":
        calls: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_call(t) for t in tools]},
        }
        if body.parallel_tool_calls is False:
            calls["maxItems"] = 1
        return ToolPlan("required", "", shown, json_grammar(calls))
    return ToolPlan("auto" if OPEN in template else "text", "", shown)


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or ANY


def _call(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": _schema(tool)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def forced_calls(text: str) -> list[Call] | None:
    """Calls of a ``required`` answer; None when it was cut off before it was whole."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return [Call(c["name"], json.dumps(c["parameters"], ensure_ascii=False)) for c in found]


class CallFinder:
    """Splits growing text into content that may be sent and calls of the offered ``names``."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._rest = ""

    def feed(self, text: str, *, final: bool) -> tuple[str, list[Call]]:
        """(content, calls) that became certain with ``text``."""
        self._rest += text
        content = ""
        calls: list[Call] = []
        while True:
            start = self._rest.find(OPEN)
            if start < 0:
                keep = 0 if final else _overlap(self._rest)
                cut = len(self._rest) - keep
                content, self._rest = content + self._rest[:cut], self._rest[cut:]
                return content, calls
            end = self._rest.find(CLOSE, start)
            if end < 0 and not final:
                content, self._rest = content + self._rest[:start], self._rest[start:]
                return content, calls
            stop = len(self._rest) if end < 0 else end + len(CLOSE)
            block = self._rest[start + len(OPEN) : end if end >= 0 else stop]
            call = self._call(block)
            content += self._rest[:start] if call else self._rest[:stop]
            calls += [call] if call else []
            self._rest = self._rest[stop:]

    def _call(self, block: str) -> Call | None:
        try:
            found = json.loads(block)
            name, arguments = found["name"], found.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if name not in self._names or not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that begins a block."""
    sizes = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if OPEN.startswith(text[-size:])), 0)


def turns(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: plain text, and arguments of past calls as objects.

    Raises:
        ValueError: arguments of a past call that are not JSON.
    """
    out = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments or "{}"),
                    },
                }
                for call in message.tool_calls
            ]
        out.append(turn)
    return out
