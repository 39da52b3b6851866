"""What a reply says, whichever server it is from.

Token ids: vLLM puts the prompt's beside ``choices`` of a chat reply and into each choice of a
completion; SGLang puts them into the choice in both. Reasoning: ``reasoning`` (vLLM) or
``reasoning_content`` (SGLang, older vLLM, DeepSeek's own). A value of the wrong type is a fault of
the server, which is named: it never becomes an empty answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark.errors import EndpointError

# What drafting did: vLLM's per-request figures, and our own server's.
EXTRA = ("metrics", "dspark")


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token, its log-probability (natural), and the most likely ones beside it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts as the server states them."""

    prompt: int
    completion: int
    reasoning: int | None = None
    cached: int | None = None


@dataclass(frozen=True)
class Choice:
    """One answer. ``token_ids`` and ``logprobs`` are None where the server did not send them.

    ``stop_reason`` is the stop string or token id that vLLM says it stopped at.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | None
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Completion:
    """A whole reply. ``model`` is the name that the server says answered."""

    endpoint: str
    model: str
    choices: tuple[Choice, ...]
    prompt_ids: tuple[int, ...] | None
    usage: Usage | None
    fingerprint: str | None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed reply; ``at`` is when it came (``time.monotonic()``, seconds).

    ``choice`` is None in pieces that carry no text (usage, keep-alives). A token of an unfinished
    character gives a piece with ids and without text. ``extra`` holds a server's own fields of
    ``EXTRA``, as they came.
    """

    endpoint: str
    at: float
    model: str
    choice: Choice | None
    index: int
    prompt_ids: tuple[int, ...] | None
    usage: Usage | None
    extra: dict[str, Any] = field(default_factory=dict)


def parse_completion(raw: Any, endpoint: str) -> Completion:
    """A reply of ``/chat/completions`` or ``/completions``.

    Raises:
        EndpointError: not of that shape, or without a choice.
    """
    _require_object(raw, endpoint)
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices:
        raise malformed(endpoint, "a reply with choices", f"choices: {choices!r:.200}")
    ordered = sorted(choices, key=lambda c: _index(c, endpoint))
    return Completion(
        endpoint=endpoint,
        model=_text(raw.get("model"), endpoint, "model"),
        choices=tuple(_choice(c, "message", endpoint) for c in ordered),
        prompt_ids=_prompt_ids(raw, ordered[0], endpoint),
        usage=_usage(raw.get("usage"), endpoint),
        fingerprint=raw.get("system_fingerprint"),
    )


def parse_chunk(raw: Any, endpoint: str, at: float) -> Chunk:
    """A piece of a streamed reply.

    Raises:
        EndpointError: not of that shape, or an error that the server put into the stream.
    """
    _require_object(raw, endpoint)
    if raw.get("error"):
        raise malformed(endpoint, "a stream without an error", f"{raw['error']!r:.300}")
    choices = raw.get("choices") or []
    if not isinstance(choices, list):
        raise malformed(endpoint, "choices as a list", f"{choices!r:.200}")
    first = choices[0] if choices else None
    return Chunk(
        endpoint=endpoint,
        at=at,
        model=_text(raw.get("model"), endpoint, "model"),
        choice=None if first is None else _choice(first, "delta", endpoint),
        index=0 if first is None else _index(first, endpoint),
        prompt_ids=_prompt_ids(raw, first or {}, endpoint),
        usage=_usage(raw.get("usage"), endpoint),
        extra={name: raw[name] for name in EXTRA if raw.get(name) is not None},
    )


def malformed(endpoint: str, expected: str, found: str) -> EndpointError:
    """A server that does not speak the protocol."""
    return EndpointError(
        expected=expected,
        found=found,
        where=f"endpoint {endpoint}",
        fix="Check that the url is an OpenAI-compatible server's, and its log.",
    )


def _require_object(raw: Any, endpoint: str) -> None:
    if not isinstance(raw, dict):
        raise malformed(endpoint, "a JSON object", f"{raw!r:.200}")


def _index(choice: Any, endpoint: str) -> int:
    _require_object(choice, endpoint)
    index = choice.get("index", 0)
    if not isinstance(index, int):
        raise malformed(endpoint, "a choice with a number as its index", repr(index))
    return index


def _choice(raw: dict[str, Any], part: str, endpoint: str) -> Choice:
    """``part`` is where chat puts the text; a plain completion has it in the choice itself."""
    _require_object(raw, endpoint)
    message = raw.get(part)
    if message is None:
        message = {"content": raw.get("text")}
    _require_object(message, endpoint)
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise malformed(endpoint, "tool_calls as a list of objects", f"{calls!r:.200}")
    return Choice(
        text=_text(message.get("content"), endpoint, "content"),
        reasoning=None if reasoning is None else _text(reasoning, endpoint, "reasoning"),
        tool_calls=tuple(calls),
        finish_reason=raw.get("finish_reason"),
        stop_reason=raw.get("stop_reason"),
        token_ids=_ids(raw.get("token_ids"), endpoint, "token_ids"),
        logprobs=_logprobs(raw.get("logprobs"), endpoint),
    )


def _text(value: Any, endpoint: str, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed(endpoint, f"{name} as text", f"{value!r:.200}")
    return value


def _ids(value: Any, endpoint: str, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise malformed(endpoint, f"{name} as a list of token ids", f"{value!r:.200}")
    return tuple(value)


def _prompt_ids(
    raw: dict[str, Any], choice: dict[str, Any], endpoint: str
) -> tuple[int, ...] | None:
    value = raw.get("prompt_token_ids")
    if value is None:
        value = choice.get("prompt_token_ids")
    return _ids(value, endpoint, "prompt_token_ids")


def _usage(raw: Any, endpoint: str) -> Usage | None:
    if raw is None:
        return None
    _require_object(raw, endpoint)
    details = raw.get("completion_tokens_details") or {}
    cached = raw.get("prompt_tokens_details") or {}
    try:
        return Usage(
            prompt=int(raw["prompt_tokens"]),
            completion=int(raw.get("completion_tokens") or 0),
            reasoning=details.get("reasoning_tokens"),
            cached=cached.get("cached_tokens"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise malformed(endpoint, "usage with token counts", f"{raw!r:.200}") from error


def _logprobs(raw: Any, endpoint: str) -> tuple[TokenLogprob, ...] | None:
    if raw is None:
        return None
    _require_object(raw, endpoint)
    try:
        if raw.get("content") is not None:
            return tuple(_chat_logprob(entry) for entry in raw["content"])
        if raw.get("tokens") is None:
            return None
        tops = raw.get("top_logprobs") or [None] * len(raw["tokens"])
        return tuple(
            TokenLogprob(str(token), float(value), tuple((top or {}).items()))
            for token, value, top in zip(raw["tokens"], raw["token_logprobs"], tops, strict=True)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise malformed(endpoint, "logprobs of each token", f"{raw!r:.200}") from error


def _chat_logprob(entry: dict[str, Any]) -> TokenLogprob:
    top = tuple((str(t["token"]), float(t["logprob"])) for t in entry.get("top_logprobs") or ())
    return TokenLogprob(str(entry["token"]), float(entry["logprob"]), top)
