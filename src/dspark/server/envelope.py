"""The fields that chunks and answers of both OpenAI routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic_core import to_json

from dspark.server.protocol import Sampling
from dspark.server.respond import event
from dspark.server.service import Result, Service, Usage


@dataclass
class Envelope:
    """What surrounds the choices of one request, in every chunk and in the whole answer.

    ``prefix`` of the id says which route it is.
    """

    service: Service
    body: Sampling
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{self.body.request_id or uuid4().hex}"

    def name(self, token: int) -> str:
        """A token of the log-probabilities: its text, or its id where that was asked for."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.service.texts(token)

    def around(
        self, kind: str, choices: list[dict[str, Any]], result: Result | None = None
    ) -> dict[str, Any]:
        """An object of ``kind``; with ``result`` also its usage and, if asked for, acceptance."""
        out: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model or self.service.name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }
        if result is None:
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                out["usage"] = None
        else:
            out["usage"] = result.usage.as_json()
            if self.body.return_acceptance:
                out["dspark"] = result.dspark()
        return out

    def chunks(self, kind: str) -> Chunks:
        """Writer of the server-sent events of a stream of ``kind``."""
        return Chunks(self, kind)


class Chunks:
    """Writes chunks: all that is the same in each of a stream is made once."""

    def __init__(self, envelope: Envelope, kind: str) -> None:
        self._envelope, self._kind = envelope, kind
        options = envelope.body.stream_options
        self._usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        # No string of JSON can hold this: its quotes would be escaped.
        head, tail = event(envelope.around(kind, [])).split(b'"choices":[]')
        self._head, self._tail = head + b'"choices":[', b"]" + tail

    def chunk(self, choice: dict[str, Any], so_far: Usage) -> bytes:
        """The event of one choice; ``so_far`` is shown if that was asked for."""
        if self._continuous:
            whole = self._envelope.around(self._kind, [choice])
            return event({**whole, "usage": so_far.as_json()})
        return self._head + to_json(choice) + self._tail

    def last(self, result: Result) -> bytes:
        """The event behind the last choice: usage and acceptance, or nothing."""
        if not self._usage and not self._envelope.body.return_acceptance:
            return b""
        return event(self._envelope.around(self._kind, [], result))
