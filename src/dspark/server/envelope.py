"""The fields that chunks and answers of both OpenAI routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from dspark.server.protocol import Sampling
from dspark.server.service import Result, Service


@dataclass(frozen=True)
class Envelope:
    """What surrounds the choices of one request, in every chunk and in the whole answer."""

    service: Service
    body: Sampling
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

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
