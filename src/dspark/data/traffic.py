"""A user's own requests as prompts: what an OpenAI-compatible server or proxy logged.

A line is a request body with ``messages`` (or ``prompt``, or ``input``), or an object that holds
one as ``request``, ``body`` or both nested; whatever else is on the line, answers, user names,
addresses and headers included, is not read. Texts go through the scrubber first, before anything is
hashed, compared or written.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from dspark.data.scrub import Scrubber
from dspark.data.shapes import Conversation, Unusable

_HOLDERS = ("request", "request_body", "body")


def request_body(row: dict[str, Any]) -> dict[str, Any]:
    """The request body in a log line.

    Raises:
        Unusable: what should hold the body is no JSON object.
    """
    body = row
    for _ in range(len(_HOLDERS)):
        holder = next((name for name in _HOLDERS if body.get(name) is not None), None)
        if holder is None:
            break
        inner = body[holder]
        if isinstance(inner, str):
            try:
                inner = json.loads(inner)
            except ValueError as error:
                raise Unusable("misshapen", f"{holder}: a JSON object", inner[:60]) from error
        if not isinstance(inner, dict):
            raise Unusable("misshapen", f"{holder}: a JSON object", repr(inner)[:60])
        body = inner
    if isinstance(body.get("instructions"), str) and "system" not in body:
        body = {**body, "system": body["instructions"]}
    return body


def scrubbed(talk: Conversation, scrub: Scrubber, counts: Counter[str]) -> Conversation:
    """``talk`` with every text scrubbed, those inside tool descriptions too."""
    talk.turns = [scrub(text, counts) for text in talk.turns]
    talk.system = None if talk.system is None else scrub(talk.system, counts)
    talk.tools = [_walk(tool, scrub, counts) for tool in talk.tools]
    return talk


def _walk(value: Any, scrub: Scrubber, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return scrub(value, counts)
    if isinstance(value, list):
        return [_walk(item, scrub, counts) for item in value]
    if isinstance(value, dict):
        return {key: _walk(item, scrub, counts) for key, item in value.items()}
    return value
