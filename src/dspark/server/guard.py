"""What is settled before any route runs: who asks, how much they send, and how long they take.

Bodies are read here, whole, within a limit of bytes and of seconds, so that no route ever waits for
a slow sender or holds more than it may. Keys are compared as hashes in constant time. Every
response carries ``x-request-id``: the caller's own, if it is harmless, or a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.server.errors import APIError

GUARDED = ("/v1/", "/debug/")
HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """ASGI middleware.

    Args:
        keys: any of them opens ``/v1`` and ``/debug``; none of them opens these to everybody.
        body_bytes, body_seconds: of one request's body.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], body_bytes: int, body_seconds: float
    ) -> None:
        self._app = app
        self._keys = [_hash(key.encode()) for key in keys]
        self._bytes, self._seconds = body_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if HARMLESS.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
        except APIError as error:
            fault = JSONResponse(error.body, error.status_code, headers=error.headers)
            await fault(scope, receive, named)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), named)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or not path.startswith(GUARDED):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = _hash(key.strip().encode("utf-8", "surrogateescape"))
        # Every key is compared, so that time says nothing about which one was near.
        same = [hmac.compare_digest(found, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(same):
            raise APIError(
                401,
                "Incorrect or missing API key. Send it as: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None when the sender left."""
        told = headers.get("content-length", "0")
        if told.isascii() and told.isdecimal() and int(told[:20]) > self._bytes:
            raise self._too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._bytes:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise APIError(
                408, f"The body did not arrive within {self._seconds:.0f} s.",
                headers={"Connection": "close"},
            ) from None  # fmt: skip

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"The body is larger than {self._bytes} bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` first, and then what really comes."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
