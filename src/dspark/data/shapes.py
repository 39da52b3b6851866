"""One row of anybody's data set to one conversation, or the reason why not.

Known shapes: OpenAI ``messages`` (with ``tools``, ``reasoning_content``, content parts, and roles
of tools), ShareGPT ``conversations``, Alpaca ``instruction``/``input``, ``prompt`` or ``input(s)``
(a text or messages), ``turns``, and token ids (``input_ids`` with ``loss_mask``). A row may hold
several, as published sets often do, if they say the same. What an assistant said is left behind:
the target answers itself.

Where tools answer, the conversation is cut: what a tool says depends on a call the target may not
make, so only user turns before the first tool result are asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.data.filters.media import media_column, media_mark, media_part
from dspark.data.prompt import check_mask, check_text

Reason = Literal["misshapen", "image", "empty", "roles"]
SHAPES = (
    "messages", "conversations", "turns", "instruction", "prompt", "input", "inputs", "input_ids",
)  # fmt: skip
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
_LANGUAGE = ("language_code", "language", "lang")


class Unusable(Exception):
    """A row that cannot be asked; ``reason`` is the filter's name for it."""

    def __init__(self, reason: Reason, expected: str, found: str) -> None:
        self.reason = reason
        self.expected = expected
        self.found = found
        super().__init__(f"expected {expected}; found {found}")


@dataclass
class Conversation:
    """What a row asks. A row of token ids has ``ids`` and ``mask``, and nothing else."""

    turns: list[str]
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    language: str | None = None
    ids: list[int] | None = None
    mask: list[int] | None = None


def recognise(row: dict[str, Any]) -> Conversation:
    """The conversation a row holds.

    Raises:
        Unusable: no known shape, media, nothing asked, or roles out of order.
    """
    found = [key for key in SHAPES if row.get(key) is not None]
    if "instruction" in found and "input" in found:
        found.remove("input")  # Alpaca: the second half of the instruction
    if not found:
        raise Unusable("misshapen", f"one of {', '.join(SHAPES)}", f"keys {sorted(row)}")
    if column := media_column(row):
        raise Unusable("image", "text alone", column)
    talk = _read(found[0], row)
    if len(found) > 1 and talk.ids is None:
        _agree(talk, found, row)
    if talk.ids is None:
        _check(talk)
    talk.language = _declared(row)
    return talk


def _read(shape: str, row: dict[str, Any]) -> Conversation:
    value = row[shape]
    if shape in {"messages", "conversations"}:
        return _messages(value, row, shape)
    if shape == "turns":
        if not isinstance(value, list) or not all(isinstance(t, str) for t in value):
            raise Unusable("misshapen", "turns: a list of texts, at least one", _short(value))
        if not value:
            raise Unusable("empty", "turns: a list of texts, at least one", "[]")
        return Conversation(list(value))
    if shape == "instruction":
        more = row.get("input")
        text, more = _text(value, "instruction"), "" if more is None else _text(more, "input")
        return Conversation([f"{text}\n\n{more}" if more.strip() else text], _system_of(row))
    if shape == "input_ids":
        return _token_ids(row)
    if isinstance(value, list):
        return _messages(value, row, shape)
    return Conversation([_text(value, shape)], _system_of(row))


def _token_ids(row: dict[str, Any]) -> Conversation:
    ids, mask = row["input_ids"], row.get("loss_mask")
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise Unusable("misshapen", f"{name}: a list of integers", _short(values))
    try:
        check_mask(ids, mask)
    except ValueError as error:
        raise Unusable("misshapen", "token ids with their loss mask", str(error)) from error
    return Conversation([], ids=ids, mask=mask)


def _messages(value: Any, row: dict[str, Any], shape: str) -> Conversation:
    if not isinstance(value, list):
        raise Unusable("misshapen", f"{shape}: a list with at least one turn", _short(value))
    if not value:
        raise Unusable("empty", f"{shape}: a list with at least one turn", "[]")
    spoken = [_turn(message) for message in value]
    _check_order([role for role, _ in spoken])
    system = [text for role, text in spoken if role == "system" and text.strip()]
    asked: list[str] = []
    for role, text in spoken:
        if role == "tool":
            break
        if role == "user":
            asked.append(text)
    if not asked:
        raise Unusable("roles", "a turn of the user", "no user turn")
    return Conversation(asked, system[0] if system else _system_of(row), _tools(row.get("tools")))


def _turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise Unusable("misshapen", "turns {role, content}", _short(message))
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise Unusable("misshapen", "role: a text", _short(role))
    known = _ROLES.get(role.lower())
    if known is None:
        raise Unusable("roles", f"a role among {', '.join(_ROLES)}", repr(role)[:60])
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        return known, _parts(content)
    if content is None and known == "assistant":
        return known, ""  # a turn that only calls tools
    return known, _text(content, "content")


def _parts(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Unusable("misshapen", "content parts {type, text}", _short(part))
        if found := media_part(part):
            raise Unusable("image", "text alone", found)
        texts.append(_text(part.get("text"), "text of a content part"))
    return "\n".join(texts)


def _check_order(roles: Sequence[str]) -> None:
    """[system,] user, assistant, user...; after an assistant, tools and assistants alternate."""
    allowed = {"system", "user"}
    after = {
        "system": {"user"},
        "user": {"assistant"},
        "assistant": {"user", "tool"},
        "tool": {"tool", "assistant"},
    }
    for number, role in enumerate(roles):
        if role not in allowed:
            found = f"roles must alternate: turn {number} is {role!r}, expected "
            found += " or ".join(repr(name) for name in sorted(allowed))
            raise Unusable("roles", "[system,] user, assistant, user...", found)
        allowed = after[role]


def _check(talk: Conversation) -> None:
    """Every turn says something, can be written, and shows nothing."""
    for number, text in enumerate(talk.turns):
        if not text.strip():
            raise Unusable("empty", "turns that ask something", f"user turn {number} is empty")
    for text in [*([talk.system] if talk.system else []), *talk.turns]:
        try:
            check_text(text, "a turn")
        except ValueError as error:
            raise Unusable("misshapen", "text that can be written", str(error)) from error
        if found := media_mark(text):
            raise Unusable("image", "text alone", found)


def _agree(talk: Conversation, found: list[str], row: dict[str, Any]) -> None:
    for shape in found[1:]:
        if shape == "input_ids":
            raise Unusable("misshapen", "text or token ids", f"{found[0]} and input_ids")
        other = _read(shape, row)
        if other.turns[:1] != talk.turns[:1]:
            raise Unusable(
                "misshapen",
                f"exactly one of {', '.join(SHAPES)}",
                f"{found[0]} and {shape} differ",
            )


def _system_of(row: dict[str, Any]) -> str | None:
    text = row.get("system")
    return text if isinstance(text, str) and text.strip() else None


def _tools(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Unusable("misshapen", "tools: a list of functions", _short(value)) from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Unusable("misshapen", "tools: a list of functions", _short(value))
    return value


def _declared(row: dict[str, Any]) -> str | None:
    for key in _LANGUAGE:
        if isinstance(value := row.get(key), str) and value.strip():
            return value.strip()
    return None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Unusable("misshapen", f"{name}: a text", _short(value))
    return value


def _short(value: Any) -> str:
    return repr(value)[:60]
