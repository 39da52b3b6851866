"""The client itself: requests, patience, streams.

Tried again: connections that fail or break, 408, 425, 429 and every 5xx. Not tried again: any other
refusal, because the same request would be refused the same way, and a stream whose first piece has
come, because its text was already given out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from dspark.client.endpoint import Endpoint, Pool, Retry, Timeouts, retry_after
from dspark.client.reply import Chunk, Completion, malformed, parse_chunk, parse_completion
from dspark.errors import EndpointError

Kind = Literal["chat", "completion"]
PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions"}
_TRY_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``/v1/models``. ``length`` is the longest sequence, where the server tells."""

    id: str
    owner: str | None = None
    length: int | None = None
    root: str | None = None


class _Busy(Exception):
    """An attempt that may be repeated; ``wait`` is the server's own wish in seconds."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class Client:
    """Sends requests to one or several endpoints; use it as an async context manager.

    ``models`` holds, per endpoint url, the name that is asked for (after :meth:`connect`).
    ``lost`` holds endpoints that were given up, with the reason.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        retry: Retry = Retry(),  # noqa: B008
        timeouts: Timeouts = Timeouts(),  # noqa: B008
    ) -> None:
        self.pool = Pool(endpoints)
        self.retry = retry
        self.timeouts = timeouts
        self.models: dict[str, str] = {}
        self._stack = AsyncExitStack()
        self._https: dict[str, httpx2.AsyncClient] = {}

    async def __aenter__(self) -> Client:
        for endpoint in self.pool.endpoints:
            headers = {}
            if endpoint.api_key:
                headers["Authorization"] = f"Bearer {endpoint.api_key}"
            limits = httpx2.Limits(max_connections=endpoint.concurrency + 2)
            timeout = httpx2.Timeout(
                self.timeouts.read, connect=self.timeouts.connect, pool=self.timeouts.read
            )
            client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout)
            self._https[endpoint.url] = await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def lost(self) -> dict[str, str]:
        """Endpoints that were given up: url -> why."""
        return self.pool.lost

    async def connect(self) -> dict[str, ModelInfo]:
        """Ask every endpoint which models it serves and settle the name to ask for.

        Returns:
            the model's line, per endpoint url.

        Raises:
            EndpointError: one is not there, serves another model, or several and none was named.
        """
        found = {}
        for endpoint in self.pool.endpoints:
            served = await self.served(endpoint)
            info = _choose(endpoint, served)
            self.models[endpoint.url] = info.id
            found[endpoint.url] = info
        return found

    async def served(self, endpoint: Endpoint) -> list[ModelInfo]:
        """What ``/v1/models`` lists; may be empty. Raises EndpointError."""
        raw = await self.get_json(endpoint, "/models")
        rows = raw.get("data") if isinstance(raw, dict) else None
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and isinstance(row.get("id"), str) for row in rows
        ):
            raise malformed(endpoint.url, "a list of models", f"{raw!r:.200}")
        return [
            ModelInfo(row["id"], row.get("owned_by"), row.get("max_model_len"), row.get("root"))
            for row in rows
        ]

    async def get_json(self, endpoint: Endpoint, path: str) -> Any:
        """JSON at ``path`` below the endpoint's base url. Raises EndpointError."""
        return _json(await self._alone(endpoint, endpoint.base + path), endpoint)

    async def get_text(self, endpoint: Endpoint, path: str) -> str:
        """Text at ``path`` of the server itself, such as ``/metrics``. Raises EndpointError."""
        return (await self._alone(endpoint, endpoint.root + path)).text

    async def request(
        self, kind: Kind, body: dict[str, Any], *, endpoint: Endpoint | None = None
    ) -> Completion:
        """Send one request and wait for the whole reply.

        Args:
            kind: ``chat`` (``messages`` in the body) or ``completion`` (``prompt``: text or ids).
            body: as the server takes it; ``model`` is filled in.
            endpoint: this one alone; None takes the one with the most room and, when that is lost,
                another.

        Raises:
            EndpointError: refused, malformed, or no endpoint is left.
        """
        while True:
            async with self.pool.place(endpoint) as chosen:
                try:
                    full = {"model": self._model(chosen), **body, "stream": False}
                    url = chosen.base + PATHS[kind]
                    response = await self._patiently(chosen, "POST", url, full)
                except _Busy as busy:
                    await self.pool.lose(chosen, str(busy))
                    continue
                return parse_completion(_json(response, chosen), chosen.url)

    async def stream(
        self, kind: Kind, body: dict[str, Any], *, endpoint: Endpoint | None = None
    ) -> AsyncIterator[Chunk]:
        """As :meth:`request`, but piece by piece; the last pieces carry the usage.

        Raises:
            EndpointError: as :meth:`request`, or the stream broke off before its end.
        """
        full = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.pool.place(endpoint) as chosen:
            content = {"model": self._model(chosen), **full}
            failures = 0
            while True:
                try:
                    async for chunk in self._pieces(chosen, kind, content):
                        yield chunk
                    return
                except _Busy as busy:
                    failures += 1
                    if self._enough(chosen, failures, busy):
                        await self.pool.lose(chosen, str(busy))
                        raise _gone(chosen, str(busy)) from busy
                    await self._sleep(chosen, failures, busy)

    async def _pieces(
        self, endpoint: Endpoint, kind: Kind, body: dict[str, Any]
    ) -> AsyncIterator[Chunk]:
        begun = ended = False
        url = endpoint.base + PATHS[kind]
        try:
            async with self._https[endpoint.url].stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    _check(response, endpoint)
                async for event in httpx2.EventSource(response, max_event_size=None):
                    if event.data.strip() == "[DONE]":
                        ended = True
                        break
                    begun = True
                    yield parse_chunk(_loads(event.data, endpoint), endpoint.url, time.monotonic())
        except httpx2.SSEError as error:
            raise malformed(endpoint.url, "a stream of events", str(error)) from error
        except httpx2.TransportError as error:
            if not begun:
                raise _Busy(_said(error)) from error
            raise _gone(endpoint, f"the stream broke off: {_said(error)}") from error
        if not ended:
            raise _gone(endpoint, "the stream ended without [DONE]")

    async def _alone(self, endpoint: Endpoint, url: str) -> httpx2.Response:
        try:
            return await self._patiently(endpoint, "GET", url, None)
        except _Busy as busy:
            raise _gone(endpoint, str(busy)) from busy

    async def _patiently(
        self, endpoint: Endpoint, method: str, url: str, body: dict[str, Any] | None
    ) -> httpx2.Response:
        """The reply to one request; _Busy when all attempts failed."""
        failures = 0
        while True:
            try:
                return await self._once(endpoint, method, url, body)
            except _Busy as busy:
                failures += 1
                if self._enough(endpoint, failures, busy):
                    tried = f" ({failures} attempts)" if failures > 1 else ""
                    raise _Busy(f"{busy}{tried}") from busy
                await self._sleep(endpoint, failures, busy)

    async def _once(
        self, endpoint: Endpoint, method: str, url: str, body: dict[str, Any] | None
    ) -> httpx2.Response:
        try:
            response = await self._https[endpoint.url].request(method, url, json=body)
        except httpx2.TransportError as error:
            raise _Busy(_said(error)) from error
        _check(response, endpoint)
        return response

    def _enough(self, endpoint: Endpoint, failures: int, busy: _Busy) -> bool:
        """Whether to stop trying: often enough, lost meanwhile, or asked to wait too long."""
        patience = (busy.wait or 0.0) <= self.retry.longest
        return failures >= self.retry.attempts or endpoint.url in self.lost or not patience

    async def _sleep(self, endpoint: Endpoint, failures: int, busy: _Busy) -> None:
        if busy.wait is not None:
            self.pool.pause(endpoint, busy.wait)
        await asyncio.sleep(max(self.retry.wait(failures), busy.wait or 0.0))

    def _model(self, endpoint: Endpoint) -> str:
        model = self.models.get(endpoint.url, endpoint.model)
        if model is None:
            raise malformed(endpoint.url, "a model's name, or connect() before", "neither")
        return model


def _choose(endpoint: Endpoint, served: list[ModelInfo]) -> ModelInfo:
    named = [info for info in served if info.id == endpoint.model]
    found = named or (served if endpoint.model is None else [])
    if len(found) == 1:
        return found[0]
    wanted = "one model" if endpoint.model is None else f"the model {endpoint.model}"
    raise EndpointError(
        expected=f"a server of {wanted}",
        found=f"it serves {', '.join(info.id for info in served) or 'none'}",
        where=f"endpoint {endpoint.url}",
        fix="Name the model as /v1/models lists it, or start the server with the right one.",
    )


def _check(response: httpx2.Response, endpoint: Endpoint) -> None:
    """Raise unless the status is 200: _Busy for what may pass, EndpointError for the rest."""
    code = response.status_code
    if code == 200:
        return
    said = " ".join(response.text.split())[:300]
    if code in _TRY_AGAIN or code >= 500:
        wait = retry_after(response.headers.get("retry-after"))
        asked = "" if wait is None else f", asks to wait {wait:.0f} s"
        raise _Busy(f"HTTP {code} {said}{asked}", wait)
    hints = {
        401: "Give the key by api_key_env.",
        403: "Give a key that may use this model.",
        404: "Check url and model name: the server knows no such place or model.",
    }
    refusal = EndpointError(
        expected="a request that the server accepts",
        found=f"HTTP {code}: {said or response.reason_phrase}",
        where=f"endpoint {endpoint.url}",
        fix=hints.get(code, "Change the request as the server says, or the server's settings."),
    )
    refusal.status = code
    raise refusal


def _json(response: httpx2.Response, endpoint: Endpoint) -> Any:
    return _loads(response.text, endpoint)


def _loads(text: str, endpoint: Endpoint) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise malformed(endpoint.url, "JSON", repr(text[:200])) from error


def _gone(endpoint: Endpoint, why: str) -> EndpointError:
    return EndpointError(
        expected="a server that answers",
        found=why,
        where=f"endpoint {endpoint.url}",
        fix="Start the server, check the url, and run the same command: finished work is kept.",
    )


def _said(error: httpx2.TransportError) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind
