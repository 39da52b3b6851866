"""ZeroMQ for one thread: messages with a JSON head, a queue others may write to, a wake-up.

Sockets belong to one thread. Both ends of a stream run one (:class:`Postman`) that owns them, so
that bodies travel and questions are answered while the main thread computes for minutes.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from dspark.errors import StreamError
from dspark.hidden.codec import Part

PORTS = "tcp://"


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Every trainer rank has its own: the next port, or the next file name."""
    if not endpoint.startswith(PORTS):
        return f"{endpoint}.{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def pack(head: dict[str, Any], parts: Sequence[Part] = ()) -> list[Part]:
    """One message."""
    return [json.dumps(head).encode(), *parts]


def unpack(frames: Sequence[Part]) -> tuple[dict[str, Any], list[Part]]:
    """Head and parts of a message; ``ValueError`` when it is not one of ours."""
    head = json.loads(bytes(frames[0])) if frames else None
    if not isinstance(head, dict) or not isinstance(head.get("type"), str):
        raise ValueError("not a message of dspark")
    return head, list(frames[1:])


class Postman(threading.Thread):
    """Owns sockets. Subclasses give :meth:`received` and :meth:`tick`; others call :meth:`post`.

    What escapes from either is kept in ``fault`` and ends the thread. Whoever waits for the
    thread's work does so under ``_news`` and calls :meth:`_raise_fault`; ``_error`` is what the
    thread has to tell them.
    """

    def __init__(self, name: str, pause: float = 0.1) -> None:
        super().__init__(name=name, daemon=True)
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.fault: BaseException | None = None
        self._news = threading.Condition()
        self._error: StreamError | None = None
        self._out: deque[tuple[int, list[Part]]] = deque()
        self._pause = pause
        self._ending = threading.Event()
        self._bell = self.context.socket(zmq.PAIR)
        self._bell.bind(f"inproc://{id(self)}")
        self._rope = self.context.socket(zmq.PAIR)
        self._rope.connect(f"inproc://{id(self)}")
        self._rope_lock = threading.Lock()

    def add_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket without limits of its own: what is in flight is bounded by what is asked for."""
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
        self.sockets.append(socket)
        return socket

    def post(self, socket: int, frames: list[Part]) -> None:
        """Queue a message for ``sockets[socket]``; any thread."""
        self._out.append((socket, frames))
        self.wake()

    def wake(self) -> None:
        """Have :meth:`tick` called now; any thread."""
        with self._rope_lock:
            if not self._ending.is_set():
                self._rope.send(b"")

    def _raise_fault(self) -> None:
        """Raise what keeps the thread from going on, in the thread that waits for it."""
        if self._error is not None:
            raise self._error
        if self.fault is not None:
            raise RuntimeError("the stream's thread died") from self.fault

    def received(self, socket: int, frames: list[Part]) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def ended(self) -> None:
        """Called once, in the thread, before its sockets are closed."""

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (*self.sockets, self._bell):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._ending.is_set():
                ready = dict(poller.poll(int(self._pause * 1000)))
                while self._bell in ready and self._bell.poll(0):
                    self._bell.recv()
                for number, socket in enumerate(self.sockets):
                    while socket in ready and socket.poll(0):
                        frames = socket.recv_multipart(copy=False)
                        self.received(number, [frame.buffer for frame in frames])
                self.tick()
                self._send()
            self.ended()
            self._send()
        except BaseException as error:
            self.fault = error
            self.failed()
        finally:
            for socket in (*self.sockets, self._bell):
                socket.close()

    def failed(self) -> None:
        """Called in the thread when it dies of ``fault``."""

    def _send(self) -> None:
        while self._out:
            number, frames = self._out.popleft()
            # Large parts are sent from the memory they lie in.
            self.sockets[number].send_multipart(frames, copy=False)

    def close(self) -> None:
        """End the thread, send what is queued (for two seconds at most) and close everything."""
        if self.is_alive():
            self.wake()
            self._ending.set()
            self.join(10)
        with self._rope_lock:
            self._ending.set()
            if not self._rope.closed:
                self._rope.close()
        self.context.destroy(linger=2000)
