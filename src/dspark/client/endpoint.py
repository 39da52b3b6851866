"""Where requests go: endpoints, how often and how long one is tried, and who has room.

A request takes a place at the live endpoint with the largest free share. Places are counted per
endpoint, so a slow server never holds up a fast one by more than its own share. An endpoint that
stays silent through all attempts of one request is *lost*: the others take over its requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit, urlunsplit

from dspark.errors import ConfigError, EndpointError


@dataclass(frozen=True)
class Endpoint:
    """One server.

    Args:
        url: with or without ``/v1``, which is added where the url has no path of its own.
        model: the name it serves the model by; None asks the server, which must serve one only.
        api_key: sent as a bearer token and never shown.
        concurrency: requests in flight at once.

    Raises:
        ConfigError: no http(s) url, or one that holds a password.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 16

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise _refused(self.url, "http://HOST:PORT or https://HOST", "another kind of url")
        if parts.username or parts.password or parts.query or parts.fragment:
            shown = urlunsplit((parts.scheme, parts.hostname, parts.path, "", ""))
            raise _refused(shown, "a url without user, password or query", "one that has them")
        if self.concurrency < 1:
            raise _refused(self.url, "concurrency of at least 1", str(self.concurrency))

    @property
    def base(self) -> str:
        """The url that ``/chat/completions`` is put behind."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path else f"{url}/v1"

    @property
    def root(self) -> str:
        """The server itself, where ``/metrics`` and ``/health`` are."""
        return self.base.removesuffix("/v1")


def _refused(where: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=f"endpoint {where}",
        fix="Write url: http://HOST:8000/v1, and give a key by api_key_env.",
    )


@dataclass(frozen=True)
class Timeouts:
    """Seconds to connect, and seconds without a byte before a reply is given up."""

    connect: float = 10.0
    read: float = 600.0


@dataclass(frozen=True)
class Retry:
    """``attempts`` at one endpoint, waits doubling from ``first`` up to ``most`` seconds.

    A wait is drawn between half of it and all of it, so that many requests that failed together do
    not come back together. A server's own Retry-After is waited in full, up to ``longest``.
    """

    attempts: int = 6
    first: float = 0.5
    most: float = 30.0
    longest: float = 600.0

    def wait(self, failures: int) -> float:
        """Seconds to wait after the ``failures``-th failure (1-based)."""
        return float(min(self.most, self.first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0))


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date. None: no such wish."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


class Pool:
    """Places at endpoints; see the module docstring. Belongs to one event loop."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        if not endpoints or len({e.base for e in endpoints}) < len(endpoints):
            raise ConfigError(
                expected="one or more endpoints of different urls",
                found="none" if not endpoints else "a url twice",
                where="endpoints",
                fix="Name each server once; raise its concurrency to send it more.",
            )
        self.endpoints = tuple(endpoints)
        self.lost: dict[str, str] = {}
        self._used = {e.url: 0 for e in endpoints}
        self._resume = {e.url: 0.0 for e in endpoints}
        self._changed = asyncio.Condition()

    def live(self) -> list[Endpoint]:
        """Endpoints that were not lost."""
        return [e for e in self.endpoints if e.url not in self.lost]

    def pause(self, endpoint: Endpoint, seconds: float) -> None:
        """Start no request at ``endpoint`` for so long: it asked to be left alone."""
        until = time.monotonic() + seconds
        self._resume[endpoint.url] = max(self._resume[endpoint.url], until)

    async def lose(self, endpoint: Endpoint, why: str) -> None:
        """Send nothing more to ``endpoint``."""
        async with self._changed:
            self.lost.setdefault(endpoint.url, why)
            self._changed.notify_all()

    @asynccontextmanager
    async def place(self, only: Endpoint | None = None) -> AsyncIterator[Endpoint]:
        """A place at the endpoint with the largest free share, or at ``only``.

        Raises:
            EndpointError: no endpoint is left; names them all and why.
        """
        endpoint = await self._take(only)
        try:
            pause = self._resume[endpoint.url] - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            yield endpoint
        finally:
            async with self._changed:
                self._used[endpoint.url] -= 1
                self._changed.notify_all()

    async def _take(self, only: Endpoint | None) -> Endpoint:
        async with self._changed:
            while True:
                wanted = [e for e in self.live() if only is None or e.url == only.url]
                if not wanted:
                    raise self._none_left(only)
                best = min(wanted, key=lambda e: self._used[e.url] / e.concurrency)
                if self._used[best.url] < best.concurrency:
                    self._used[best.url] += 1
                    return best
                await self._changed.wait()

    def _none_left(self, only: Endpoint | None) -> EndpointError:
        lost = {u: why for u, why in self.lost.items() if only is None or u == only.url}
        return EndpointError(
            expected="an endpoint that answers",
            found="; ".join(f"{url}: {why}" for url, why in lost.items()),
            where=", ".join(f"endpoint {url}" for url in lost),
            fix="Start the server again and run the same command: finished work is kept.",
        )
