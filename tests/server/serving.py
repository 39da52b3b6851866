"""A real uvicorn around the made pair, on loopback, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from dspark import Engine
from dspark.config.engine import EngineOptions
from dspark.server.app import About, create_app
from dspark.server.run import Listen, make_server
from dspark.server.service import Limits, Service

MODEL = "made-pair"
CHAT = "/v1/chat/completions"


def chat(text: str = "hello") -> list[dict[str, str]]:
    """One user turn."""
    return [{"role": "user", "content": text}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def fault(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape to the field."""
    assert response.status_code == status, response.text
    found = response.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["message"]
    return found["error"]


@dataclass
class Served:
    """A running server and the engine in it."""

    base: str
    service: Service
    server: Any

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=60)

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.base, timeout=60, **options)

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def idle(self, seconds: float = 20) -> None:
        """Wait until nothing is held: all pages free, nobody known."""
        core, until = self.service.engine.core, time.monotonic() + seconds
        while time.monotonic() < until:
            free = core.pool.available == core.pool.count
            if free and not core._groups and not core.unfinished and not self.service.gate.inside:
                return
            time.sleep(0.02)
        raise AssertionError(
            f"{core.pool.available} of {core.pool.count} pages free, {list(core._groups)} known, "
            f"{self.service.gate.inside} inside"
        )


def make_engine(pair: tuple[Path, Path], *, draft: bool = True, **options: Any) -> Engine:
    target, folder = pair
    options = {"max_requests": 8, "cache_gib": 0.05, **options}
    return Engine(
        str(target), folder if draft else None, options=EngineOptions(**options), device="cpu"
    )


@contextmanager
def serving(
    engine: Engine,
    *,
    keys: tuple[str, ...] = (),
    draft: str | None = "draft",
    examples: tuple[Any, ...] = (),
    role: Any = None,
    **limits: Any,
) -> Iterator[Served]:
    """A server around ``engine`` while the context is open."""
    service = Service(engine, MODEL, Limits(**limits), role)
    drafter = engine.core.drafter
    block = drafter.block_size if drafter else 0
    about = About(version="test", target="made", draft=draft, block_size=block, examples=examples)
    server = make_server(create_app(service, about, keys), Listen(port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", service, server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def raw_request(port: int, data: bytes, wait: float = 10) -> bytes:
    """What the server answers to exactly these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as link:
        link.sendall(data)
        parts = []
        while True:
            try:
                part = link.recv(65536)
            except (ConnectionResetError, TimeoutError):
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)
