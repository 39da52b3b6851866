"""One address in front of several servers: a request belongs to the router until it is answered.

Each request goes to the server with the fewest of them. A server that dies, at whatever moment,
loses none: what it was asked is asked another one, from the beginning and with the same seed (the
router draws one where the client names none), and of a stream that was begun only what the client
does not have yet is passed on. What cannot be continued piece by piece (tool calls, probabilities,
token ids) is held back until it is whole.

Servers must be alike: the same target, draft and options. Where one answers otherwise than the dead
one had begun, the stream ends with an error and never with a mixture.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dspark.server.errors import APIError, bad_request
from dspark.server.guard import Guard
from dspark.server.respond import ClientGone, EventStream, event, while_there
from dspark.server.resumed import Gone, Passed, chunks, otherwise
from dspark.server.service import Limits

LOG = logging.getLogger("dspark.server")
# Fields whose answers have parts that cannot be cut where the client's copy ends.
WHOLE = ("tools", "logprobs", "top_logprobs", "return_token_ids", "return_token_kinds", "echo")
# As good as no answer: another server may have room, or be up.
ELSEWHERE = frozenset({429, 502, 503, 504})
REST, PAUSE, STALL = 2.0, 0.1, 60.0  # seconds


@dataclass
class Server:
    """One of those behind the router; not asked before ``rests_until``. ``inside`` it asks now."""

    url: str
    inside: int = 0
    rests_until: float = 0.0


@dataclass
class Counts:
    """Requests since the start, and how often one was asked again after a server was gone."""

    requests: int = 0
    resubmitted: int = 0


class Router:
    """``patience``: seconds that a request waits for a server that answers."""

    def __init__(self, urls: Sequence[str], patience: float) -> None:
        self.servers = [Server(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self.patience, self.counts = patience, Counts()
        # A prompt may take minutes before the first byte: a dead server's connection breaks.
        self.client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=5.0), limits=httpx2.Limits(max_connections=None)
        )

    async def answer(self, request: Request) -> Response:
        """A completion or a chat completion."""
        body = _object(await request.body())
        self.counts.requests += 1
        if body.get("seed") is None:
            body["seed"] = secrets.randbits(31)
        streamed = body.get("stream") is True
        held = any(body.get(name) for name in WHOLE)
        if not streamed or held:
            whole = self._whole(request, body)
            response = await while_there(request.receive, whole)
            kind = response.headers.get("content-type")
            return Response(response.content, response.status_code, _kept(response), kind)
        opened = self._open(request, body)
        first = await while_there(request.receive, anext(opened))
        if first.status_code != 200:
            async with aclosing(opened):
                content = await first.aread()
            kind = first.headers.get("content-type")
            return Response(content, first.status_code, _kept(first), kind)
        return EventStream(self._pieces(first, opened), STALL)

    async def _whole(self, request: Request, body: dict[str, Any]) -> httpx2.Response:
        async with aclosing(self._open(request, body)) as attempts:
            async for response in attempts:
                try:
                    await response.aread()
                except httpx2.TransportError:
                    continue
                cut = response.status_code == 200 and b"data: [DONE]" not in response.content
                if cut and body.get("stream") is True:
                    continue
                return response
        raise AssertionError("attempts end with an error")

    async def _pieces(
        self, response: httpx2.Response, opened: AsyncGenerator[httpx2.Response, None]
    ) -> AsyncGenerator[bytes, None]:
        passed = Passed()
        async with aclosing(opened):
            while True:
                ahead = dict(passed.text)
                try:
                    async for chunk in chunks(response):
                        if "error" in chunk:
                            yield event(chunk)
                            return
                        if (rest := passed.rest(chunk, ahead)) is not None:
                            yield event(rest)
                    if any(ahead.values()):
                        raise otherwise()
                    return
                except Gone:
                    response = await anext(opened)
                    if response.status_code != 200:
                        raise APIError(502, (await response.aread()).decode()[:300]) from None

    async def _open(
        self, request: Request, body: dict[str, Any]
    ) -> AsyncGenerator[httpx2.Response, None]:
        """Replies of one server after the other, as often as who asks comes back for another: it
        does when the one it got broke off.

        Raises:
            APIError: for ``patience`` seconds no server took it.
        """
        until, lost = time.monotonic() + self.patience, 0
        refused: tuple[int, bytes, dict[str, str]] | None = None
        while True:
            server = self._free()
            if server is not None:
                with _inside(server):
                    try:
                        response = await self._ask(server, request, body)
                    except Gone:
                        response, lost = None, lost + 1
                    if response is not None and response.status_code not in ELSEWHERE:
                        self.counts.resubmitted += lost
                        try:
                            yield response
                        finally:
                            await response.aclose()
                        # Who comes back lost it.
                        lost = 1
                        server.rests_until = time.monotonic() + REST
                        LOG.warning("%s broke off an answer: asking another", server.url)
                        until = time.monotonic() + self.patience
                        continue
                    if response is not None:
                        refused = (response.status_code, await response.aread(), _kept(response))
                        await response.aclose()
                server.rests_until = time.monotonic() + REST
            if time.monotonic() > until or (refused and self._free() is None):
                raise _none_left(refused)
            if self._free() is None:
                await asyncio.sleep(PAUSE)

    async def _ask(
        self, server: Server, request: Request, body: dict[str, Any]
    ) -> httpx2.Response | None:
        """The head of its reply, None when it is not there.

        Raises:
            Gone: it took the request and broke off before that.
        """
        headers = {"content-type": "application/json"}
        if (key := request.headers.get("authorization")) is not None:
            headers["authorization"] = key
        url = server.url + request.url.path
        made = self.client.build_request("POST", url, content=to_json(body), headers=headers)
        try:
            return await self.client.send(made, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            LOG.warning("%s does not answer", server.url)
            return None
        except httpx2.TransportError as error:
            LOG.warning("%s broke off before its answer: asking another", server.url)
            raise Gone from error

    def _free(self) -> Server | None:
        now = time.monotonic()
        there = [server for server in self.servers if server.rests_until <= now]
        return min(there, key=lambda server: server.inside, default=None)

    async def fact(self, request: Request) -> Response:
        """What any of the servers says (models, version); 502 when none does."""
        headers = {k: v for k, v in request.headers.items() if k == "authorization"}
        for server in sorted(self.servers, key=lambda server: server.rests_until):
            try:
                found = await self.client.get(server.url + request.url.path, headers=headers)
            except httpx2.TransportError:
                continue
            kind = found.headers.get("content-type")
            return Response(found.content, found.status_code, _kept(found), kind)
        raise _none_left(None)

    async def health(self, _: Request) -> Response:
        """Who is behind it, and what happened."""
        now = time.monotonic()
        servers = [
            {"url": s.url, "inside": s.inside, "resting": s.rests_until > now} for s in self.servers
        ]
        counts = {"requests": self.counts.requests, "resubmitted": self.counts.resubmitted}
        return JSONResponse({"status": "ok", "servers": servers, **counts})


def create_router(urls: Sequence[str], patience: float = 60.0) -> Starlette:
    """The application of ``dspark route``."""
    router, limits = Router(urls, patience), Limits()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await router.client.aclose()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return JSONResponse(error.body, error.status_code, headers=error.headers)

    async def nobody(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    return Starlette(
        routes=[
            Route("/v1/completions", router.answer, methods=["POST"]),
            Route("/v1/chat/completions", router.answer, methods=["POST"]),
            Route("/v1/models", router.fact),
            Route("/v1/models/{model:path}", router.fact),
            Route("/version", router.fact),
            Route("/health", router.health),
        ],
        exception_handlers={APIError: refused, ClientGone: nobody},
        middleware=[
            # Keys are the servers' own to check.
            Middleware(
                Guard, keys=[], body_bytes=limits.body_bytes, body_seconds=limits.body_seconds
            )
        ],
        lifespan=lifespan,
    )


@contextmanager
def _inside(server: Server) -> Iterator[None]:
    server.inside += 1
    try:
        yield
    finally:
        server.inside -= 1


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad_request("The body is not a JSON object.")
    return found


def _kept(response: httpx2.Response) -> dict[str, str]:
    names = ("retry-after", "x-request-id", "www-authenticate")
    return {name: response.headers[name] for name in names if name in response.headers}


def _none_left(refused: tuple[int, bytes, dict[str, str]] | None) -> APIError:
    if refused is None:
        return APIError(502, "None of the servers behind this address answers.")
    status, content, headers = refused
    return APIError(status, content.decode(errors="replace")[:300], headers=headers)
