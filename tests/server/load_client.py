"""Many clients of one server, in a process of their own: ``load_client.py < JSON``.

The JSON object holds ``base``, ``requests`` (bodies of chat requests that ask for their token ids)
and ``clients`` at once. Prints one JSON object: seconds of the whole, generated tokens, CPU seconds
of this process, and per streamed request the time to the first piece and the time per token after
it.

What is measured is the server, so the clients must cost next to nothing: bare sockets, looked at
every few milliseconds instead of being woken by every piece (as if they were on another machine),
and nothing is parsed before the clock has stopped. Times are as exact as the looks are frequent.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

LOOK = 0.002  # seconds
IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')


@dataclass
class Exchange:
    """One request and what came back, with the times of arrival."""

    streamed: bool
    sent: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    tail: bytes = b""
    length: int | None = None

    def take(self, data: bytes) -> bool:
        """Whether the response is whole now."""
        self.parts.append((time.perf_counter(), data))
        self.tail = self.tail[-8:] + data
        if self.streamed:
            return self.tail.endswith(b"\r\n0\r\n\r\n")
        whole = b"".join(part for _, part in self.parts)
        head, _, rest = whole.partition(b"\r\n\r\n")
        if self.length is None and (found := re.search(rb"(?i)content-length: (\d+)", head)):
            self.length = int(found[1])
        return self.length is not None and len(rest) >= self.length


def count(data: bytes) -> int:
    """Token ids in a piece of a response."""
    return sum(found.count(b",") + 1 for found in IDS.findall(data) if found.strip())


def report(done: list[Exchange], out: dict[str, Any]) -> None:
    """Add what the exchanges say to ``out``."""
    for exchange in done:
        whole = b"".join(data for _, data in exchange.parts)
        assert whole.startswith(b"HTTP/1.1 200"), whole[:2000]
        assert b'data: {"error"' not in whole, whole[-2000:]
        tokens = count(whole)
        out["tokens"] += tokens
        out["whole"].append(exchange.parts[-1][0] - exchange.sent)
        if exchange.streamed:
            # Pieces are whole lines: a piece cut in two by the network is seen with its second half.
            pieces = [(at, count(data)) for at, data in exchange.parts if b"token_ids" in data]
            (first, early), last = pieces[0], pieces[-1][0]
            out["first"].append(first - exchange.sent)
            out["each"].append((last - first) / max(1, tokens - early))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    host, _, port = asked["base"].removeprefix("http://").partition(":")
    waiting = [(b.get("stream", False), json.dumps(b).encode()) for b in asked["requests"][::-1]]
    ready = selectors.DefaultSelector()
    done: list[Exchange] = []

    def ask(link: socket.socket) -> None:
        streamed, body = waiting.pop()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        exchange = Exchange(bool(streamed), time.perf_counter())
        ready.register(link, selectors.EVENT_READ, exchange)
        link.sendall(head.encode() + body)

    start = time.perf_counter()
    for _ in range(min(asked["clients"], len(waiting))):
        ask(socket.create_connection((host, int(port))))
    while ready.get_map():
        time.sleep(LOOK)
        for key, _ in ready.select(0):
            data = key.fileobj.recv(1 << 20)
            assert data, f"closed early: {key.data.tail!r}"
            if key.data.take(data):
                done.append(key.data)
                ready.unregister(key.fileobj)
                if waiting:
                    ask(key.fileobj)
                else:
                    key.fileobj.close()
    out: dict[str, Any] = {"tokens": 0, "first": [], "each": [], "whole": []}
    out |= {"seconds": time.perf_counter() - start, "cpu": time.process_time()}
    report(done, out)
    return out


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
