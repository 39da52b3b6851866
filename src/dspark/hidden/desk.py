"""The thread of a stream reader: who asks, who is alive, what arrived.

Everything here runs in the thread that owns the sockets, or under the lock ``_news``.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from dspark.errors import ConfigError, StreamError
from dspark.hidden.codec import Part, TapsCoding
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.rows import Group, Teaching
from dspark.hidden.transport import Kind, Transport, open_transport

PER_TEACHER = 2  # groups a teacher has at a time: one to compute, one to go on with
ATTEMPTS = 3


@dataclass(frozen=True)
class StreamSettings:
    """``pool_bytes`` bounds what is asked for and not acked; ``window_bytes`` is the upper bound of
    one optimiser window. A teacher that is silent for ``dead_seconds`` is dead."""

    endpoint: str
    pool_bytes: int
    window_bytes: int
    transport: Kind = "tcp"
    folder: Path | None = None
    stream: str = "stream"
    taps: TapsCoding = "stored"
    dead_seconds: float = 10.0
    stall_seconds: float = 600.0


@dataclass
class Teacher:
    name: str
    instance: str
    seen: float
    computing: float | None = None  # since when
    sent: int = 0
    received: int = 0
    numbers: list[int] = field(default_factory=list)


@dataclass
class Asked:
    group: Group
    charge: int
    teacher: bytes | None = None
    attempts: int = 0
    bodies: dict[int, list[Part]] = field(default_factory=dict)
    bytes: int = 0

    @property
    def whole(self) -> bool:
        return len(self.bodies) == len(self.group.rows)


class Desk(Postman):
    """Asks for ``groups`` in order, of whatever teachers are there.

    Raises:
        ConfigError: the pool is smaller than one optimiser window.
        StreamError: the endpoint is taken.
    """

    def __init__(
        self, settings: StreamSettings, teaching: Teaching, groups: Iterator[Group]
    ) -> None:
        if settings.pool_bytes < settings.window_bytes:
            raise ConfigError(
                expected=f"a pool of at least one optimiser window, {settings.window_bytes:,} "
                "bytes: rows are only released when their step is taken",
                found=f"{settings.pool_bytes:,} bytes",
                where="train.stream.pool_gb",
                fix="Raise it, or lower train.accumulate or train.batch_size.",
            )
        super().__init__("stream-reader")
        self.settings, self.teaching = settings, teaching
        self.session = secrets.token_hex(8)
        self.transport: Transport = open_transport(
            settings.transport, settings.stream, settings.folder
        )
        self.orphans = self.transport.gc()
        self._groups: Iterator[Group] = groups
        self._next: Group | None = None
        self._exhausted = False
        self._asked: dict[int, Asked] = {}
        self._waiting: deque[int] = deque()
        self._teachers: dict[bytes, Teacher] = {}
        self._refused: dict[bytes, str] = {}
        self._lost = 0
        self._progress = time.monotonic()
        self.counts = {"records": 0, "tokens": 0, "bytes": 0, "strays": 0, "asked_again": 0}
        self.wait_seconds = 0.0
        self._bind()
        self.start()

    def _bind(self) -> None:
        socket = self.add_socket(zmq.ROUTER)
        try:
            socket.bind(self.settings.endpoint)
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            raise StreamError(
                expected="a free endpoint",
                found=str(error),
                where=f"train.stream.endpoint {self.settings.endpoint}",
                fix="Is another run of this recipe alive? Otherwise name another port.",
            ) from error

    def received(self, socket: int, frames: list[Part]) -> None:
        peer = bytes(frames[0])
        try:
            head, parts = unpack(frames[1:])
            kind, session = head["type"], head.get("session")
            with self._news:
                if kind == "hello":
                    self._hello(peer, head)
                    return
                teacher = self._teachers.get(peer)
                if teacher is None or session != self.session:
                    if peer not in self._refused:
                        self.post(0, [peer, *pack({"type": "who"})])
                    return
                teacher.seen = time.monotonic()
                if kind == "beat":
                    teacher.sent = int(head["sent"])
                    self.post(0, [peer, *pack({"type": "beat"})])
                elif kind == "record":
                    self._record(peer, teacher, head, parts)
                elif kind == "failed":
                    self._failed(peer, int(head["group"]), str(head["error"]))
                elif kind == "bye":
                    self._drop(peer)
        except (ValueError, LookupError, TypeError):
            self.counts["strays"] += 1  # not one of ours: a port scan must not end a run

    def _hello(self, peer: bytes, head: dict[str, Any]) -> None:
        name, instance = str(head["teacher"]), str(head["instance"])
        faults = self.teaching.faults(head)
        for other, teacher in list(self._teachers.items()):
            if other != peer and teacher.instance == instance:
                self._drop(other)  # its connection broke; what was on its way is lost
            elif other != peer and teacher.name == name:
                faults.append(f"a second writer called {name}: one rank of a teacher sends")
        if faults:
            self._refused[peer] = f"{name}: {'; '.join(faults)}"
            self.post(0, [peer, *pack({"type": "refuse", "found": "; ".join(faults)})])
            return
        if peer in self._teachers:
            self._drop(peer)
        self._teachers[peer] = Teacher(name, instance, time.monotonic())
        settings = self.settings
        welcome = {
            "type": "welcome",
            "session": self.session,
            "transport": settings.transport,
            "stream": settings.stream,
            "folder": None if settings.folder is None else str(settings.folder),
            "taps": settings.taps,
        }
        self.post(0, [peer, *pack(welcome)])

    def _record(
        self, peer: bytes, teacher: Teacher, head: dict[str, Any], parts: list[Part]
    ) -> None:
        number, index = int(head["group"]), int(head["index"])
        asked = self._asked.get(number)
        teacher.received += 1
        if asked is None or asked.teacher != peer or not 0 <= index < len(asked.group.rows):
            self.counts["strays"] += 1  # of a teacher that was given up
            self._discard(parts)
            return
        asked.bodies[index] = parts
        asked.bytes += int(head["bytes"])
        self._progress = time.monotonic()
        self.counts["records"] += 1
        self.counts["tokens"] += int(head["tokens"])
        self.counts["bytes"] += int(head["bytes"])
        if asked.whole:
            asked.charge = asked.bytes
            if asked.bytes > asked.group.bound:
                self._error = StreamError(
                    expected=f"at most {asked.group.bound:,} bytes of group {number}",
                    found=f"{asked.bytes:,} bytes",
                    where=f"stage: teacher {teacher.name}",
                    fix="Teacher and trainer must run the same recipe.",
                )
            teacher.numbers.remove(number)
            self._news.notify_all()

    def _discard(self, notice: list[Part]) -> None:
        """Take a body that nobody wants, so that no file of it stays."""
        with contextlib.suppress(StreamError):
            self.transport.get("stray", notice)
            self.transport.ack("stray")

    def _failed(self, peer: bytes, number: int, text: str) -> None:
        asked = self._asked.get(number)
        if asked is None or asked.teacher != peer:
            return
        if asked.attempts + 1 >= ATTEMPTS:
            self._error = StreamError(
                expected=f"states of {', '.join(r.id for r in asked.group.rows)}",
                found=text,
                where=f"stage: teacher {self._teachers[peer].name}",
                fix="See the teacher's log.",
            )
            self._news.notify_all()
            return
        self._again(number)

    def _again(self, number: int) -> None:
        asked = self._asked.get(number)
        if asked is None:
            return
        teacher = self._teachers.get(asked.teacher or b"")
        if teacher is not None and number in teacher.numbers:
            teacher.numbers.remove(number)
        for index, notice in asked.bodies.items():
            self.transport.abort(f"{number}.{index}")
            self._discard(notice)
        asked.bodies, asked.teacher, asked.bytes = {}, None, 0
        asked.charge = asked.group.bound
        asked.attempts += 1
        self.counts["asked_again"] += 1
        self._waiting.appendleft(number)

    def _drop(self, peer: bytes) -> None:
        """Forget a teacher; its groups go to others, the first one first."""
        teacher = self._teachers.pop(peer)
        self._lost += 1
        for number in sorted(teacher.numbers, reverse=True):
            asked = self._asked.get(number)
            if asked is not None:
                asked.attempts -= 1  # dying is not the group's fault
                self._again(number)

    def tick(self) -> None:
        with self._news:
            now = time.monotonic()
            for peer, teacher in list(self._teachers.items()):
                if now - teacher.seen > self.settings.dead_seconds:
                    self._drop(peer)
            self._admit()
            self._dispatch()

    def _peek(self) -> Group | None:
        if self._next is None and not self._exhausted:
            self._next = next(self._groups, None)
            self._exhausted = self._next is None
        return self._next

    def _admit(self) -> None:
        held = sum(a.charge for a in self._asked.values())
        while (group := self._peek()) is not None and (
            not self._asked or held + group.bound <= self.settings.pool_bytes
        ):
            self._asked[group.number] = Asked(group, group.bound)
            self._waiting.append(group.number)
            held += group.bound
            self._next = None

    def _dispatch(self) -> None:
        while self._waiting and self._teachers:
            peer, teacher = min(self._teachers.items(), key=lambda item: len(item[1].numbers))
            if len(teacher.numbers) >= PER_TEACHER:
                return
            number = self._waiting.popleft()
            asked = self._asked.get(number)
            if asked is None:
                continue
            asked.teacher = peer
            teacher.numbers.append(number)
            rows = [vars(row) for row in asked.group.rows]
            work = {"type": "work", "session": self.session, "group": number, "rows": rows}
            self.post(0, [peer, *pack(work)])

    def failed(self) -> None:
        with self._news:
            self._news.notify_all()
