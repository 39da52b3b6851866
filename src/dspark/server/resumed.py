"""A stream that one server begins and another ends: what of it the client has, and the rest.

The second one answers from the beginning. It repeats what is passed on already, which is taken away
piece by piece, or it says something else, and then there is no honest way to go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from pydantic_core import from_json

from dspark.server.errors import APIError


class Gone(Exception):
    """The server that was asked is not there any more."""


@dataclass
class Passed:
    """What of a stream the client has: text per choice, which choices ended, who it is from."""

    text: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    head: dict[str, Any] = field(default_factory=dict)
    usage: bool = False

    def rest(self, chunk: dict[str, Any], ahead: dict[int, str]) -> dict[str, Any] | None:
        """``chunk`` without what the client has; None when nothing is left.

        ``ahead``: per choice the text that this stream must repeat first; what it repeats is taken
        away from it.

        Raises:
            APIError: it says something else.
        """
        first = not self.head
        if first:
            self.head = {key: chunk[key] for key in ("id", "created") if key in chunk}
        chunk = {**chunk, **self.head}
        left = []
        for choice in chunk.get("choices") or ():
            index, new = choice.get("index", 0), _text(choice)
            known = ahead.get(index, "")
            if not (new.startswith(known) or known.startswith(new)):
                raise otherwise()
            ahead[index] = known[len(new) :]
            new = new[len(known) :]
            ends = choice.get("finish_reason") is not None and index not in self.ended
            begins = index not in self.text
            if new or ends or begins:
                self.text[index] = self.text.get(index, "") + new
                self.ended |= {index} if ends else set()
                left.append(_with_text(choice, new))
        usage = chunk.get("usage") is not None and not chunk.get("choices") and not self.usage
        self.usage |= usage
        return {**chunk, "choices": left} if left or usage else None


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice's piece."""
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return text or ""


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    """``choice`` with ``text`` as its piece."""
    if "delta" not in choice:
        return {**choice, "text": text}
    delta = choice["delta"]
    return {**choice, "delta": {**delta, "content": text} if "content" in delta else delta}


async def chunks(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream up to its end. Raises Gone when it breaks off before that."""
    try:
        async for found in httpx2.EventSource(response, max_event_size=None):
            if found.data.strip() == "[DONE]":
                return
            yield from_json(found.data)
    except (httpx2.TransportError, httpx2.SSEError, ValueError) as error:
        raise Gone from error
    raise Gone


def otherwise() -> APIError:
    """What ends a stream that cannot be continued."""
    return APIError(502, "The server was lost in the middle, and another one answers otherwise.")
