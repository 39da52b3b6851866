"""Getting an answer to a reader who may leave, or may not read.

While an answer is made, somebody listens whether its reader is still there: when the connection is
closed, work stops and what it held is free. A reader who stays but does not read blocks nobody (the
engine never waits for a socket), and is cut off after a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from dspark.server.errors import APIError, internal

T = TypeVar("T")
LOG = logging.getLogger("dspark.server")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The reader closed the connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _settle(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled when the reader leaves.

    Raises:
        ClientGone: the reader left first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _settle(task, gone)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


class EventStream(Response):
    """Server-sent events out of ``events``.

    A piece that is not taken for ``stall_seconds`` (or a quarter more) ends the connection. A fault
    after the first piece can no longer be a status: it is sent as an event with OpenAI's error
    shape.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stall = events, stall_seconds
        self._since = math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            # One look now and then instead of a timer for every piece.
            while not pump.done() and not gone.done() and not self._stuck():
                await asyncio.wait(
                    {pump, gone}, timeout=self._stall / 4, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            await _settle(pump, gone)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await self._send(send, start)
            try:
                async for piece in self._events:
                    if piece:
                        await self._send(send, _body(piece))
            except APIError as error:
                await self._send(send, _body(event(error.body)))
            except OSError:
                raise
            except Exception:
                LOG.exception("a stream failed")
                await self._send(send, _body(event(internal().body)))
            await self._send(send, _body(DONE))
            await self._send(send, _body(b"", more=False))
        except OSError:
            pass  # it left while a piece was on its way

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._since = time.monotonic()
        await send(message)
        self._since = math.inf

    def _stuck(self) -> bool:
        """Whether a piece lies there for too long."""
        stuck = time.monotonic() - self._since > self._stall
        if stuck:
            LOG.warning("a reader took no piece for %.0f s and was cut off", self._stall)
        return stuck


def _body(piece: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": more}
