"""A real HTTP server whose replies a test writes: one thread per connection, on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is sent back; ``pieces`` are events of a stream, ``cut`` breaks the connection off."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Any] | None = None
    cut: bool = False
    done: bool = True
    seconds: float = 0.0


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: Any
    at: float


Script = Callable[[Seen], Reply]


class Scripted:
    """The running server: its url, and everything it was asked."""

    def __init__(self, script: Script) -> None:
        self.seen: list[Seen] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                owner.answer(self, script)

            do_POST = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients that hang up are part of the tests

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, script: Script) -> None:
        size = int(handler.headers.get("content-length") or 0)
        raw = handler.rfile.read(size)
        headers = {k.lower(): v for k, v in handler.headers.items()}
        seen = Seen(handler.path, headers, json.loads(raw) if raw else None, time.monotonic())
        with self._lock:
            self.seen.append(seen)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            reply = script(seen)
            time.sleep(reply.seconds)
            _send(handler, reply)
        finally:
            with self._lock:
                self._now -= 1

    def asked(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]


def _send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    if reply.cut and reply.pieces is None:
        handler.close_connection = True
        return
    if reply.pieces is None:
        body = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        data = body.encode()
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
        return
    handler.close_connection = True
    handler.send_response(reply.status)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    if reply.cut:
        handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for piece in reply.pieces:
        handler.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        handler.wfile.flush()
    if reply.done and not reply.cut:
        handler.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    running = Scripted(script)
    thread = threading.Thread(target=running.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.server.shutdown()
        running.server.server_close()
