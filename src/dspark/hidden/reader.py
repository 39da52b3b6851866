"""The trainer's end of a stream: it asks, in the order of its plan, and teachers deliver.

*Pull, not push.* A teacher works only on what it was asked for, and rows are asked for only while
their upper bound fits into the pool beside what is held. So a stream is bounded by bytes without
anybody blocking on a full queue, the rows that are needed next are always the first ones asked for,
and a pool that holds one optimiser window can never deadlock (a smaller one is refused).

*Nothing in flight needs saving.* What was asked for is a function of the plan's position. A resumed
trainer asks anew from its checkpoint, under a new session; whatever an old session left is swept,
and late deliveries of it are dropped. A teacher that dies has its groups asked for elsewhere.

*Standing still has a name.* :meth:`StreamReader.get` waits ``stall_seconds`` without any arrival
and then says which stage starves: teacher, transport or trainer.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from dspark.errors import ConfigError, DamagedArtifactError, StreamError
from dspark.hidden.codec import Part, TapsCoding, decode
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.record import HiddenRecord
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
class _Teacher:
    name: str
    instance: str
    seen: float
    computing: float | None = None  # since when
    sent: int = 0
    received: int = 0
    numbers: list[int] = field(default_factory=list)


@dataclass
class _Asked:
    group: Group
    charge: int
    teacher: bytes | None = None
    attempts: int = 0
    bodies: dict[int, list[Part]] = field(default_factory=dict)
    bytes: int = 0

    @property
    def whole(self) -> bool:
        return len(self.bodies) == len(self.group.rows)


class StreamReader(Postman):
    """Asks for ``groups`` in order and keeps them until they are acked.

    Raises:
        StreamError: the pool is smaller than one optimiser window, or the endpoint is taken.
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
        self._asked: dict[int, _Asked] = {}
        self._waiting: deque[int] = deque()
        self._teachers: dict[bytes, _Teacher] = {}
        self._refused: dict[bytes, str] = {}
        self._lost = 0
        self._error: StreamError | None = None
        self._news = threading.Condition()
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

    # --- the trainer's side ------------------------------------------------------------------

    def ask(self, groups: Iterator[Group]) -> None:
        """Ask for these behind all others. Only the reader's thread draws from ``groups``."""
        with self._news:
            self._groups = itertools.chain(self._groups, groups)
            self._exhausted = False
        self.wake()

    def get(self, number: int) -> list[HiddenRecord]:
        """Records of group ``number``, in the order of its rows; waits for them.

        Raises:
            StreamError: nothing arrived for ``stall_seconds``, or a group failed again and again.
            DamagedArtifactError: a body stayed damaged when it was asked for again.
        """
        began = time.monotonic()
        try:
            while True:
                asked = self._await(number, began)
                try:
                    return [self._open(asked, index) for index in range(len(asked.group.rows))]
                except (DamagedArtifactError, StreamError):
                    if asked.attempts + 1 >= ATTEMPTS:
                        raise
                    self.abort(number)
        finally:
            self.wait_seconds += time.monotonic() - began

    def _await(self, number: int, began: float) -> _Asked:
        with self._news:
            while True:
                if self._error is not None:
                    raise self._error
                if self.fault is not None:
                    raise RuntimeError("the stream's thread died") from self.fault
                asked = self._asked.get(number)
                if asked is not None and asked.whole:
                    return asked
                since = max(began, self._progress)
                if time.monotonic() - since > self.settings.stall_seconds:
                    raise self._starved(number)
                self._news.wait(0.2)

    def _open(self, asked: _Asked, index: int) -> HiddenRecord:
        row = asked.group.rows[index]
        key = f"{asked.group.number}.{index}"
        parts = self.transport.get(key, asked.bodies[index])
        # Opened once: a file is the reader's now and has no name any more.
        record = decode(parts, f"stage: transport, hidden record {row.id}")
        faults = []
        if record.id != row.id:
            faults.append(f"the record of {record.id}")
        if record.layer_ids != self.teaching.layer_ids or record.stream != self.teaching.stream:
            faults.append(f"layers {list(record.layer_ids)} of {record.stream}")
        given = tuple(record.ids[: len(row.ids)].tolist())
        if (
            given != row.ids
            or len(record) > row.longest
            or (row.new_tokens == 0 and len(record) != len(row.ids))
        ):
            faults.append(f"{len(record)} tokens that are not the ones asked for")
        if faults:
            raise DamagedArtifactError(
                expected=f"states of row {row.id} as it was asked for",
                found="; ".join(faults),
                where=f"stage: teacher, hidden record {row.id}",
                fix="Teacher and trainer must run the same recipe.",
            )
        return record

    def ack(self, number: int) -> None:
        """The gradient of group ``number`` is in the optimiser: release it."""
        with self._news:
            asked = self._asked.pop(number, None)
        if asked is not None:
            for index in range(len(asked.group.rows)):
                self.transport.ack(f"{number}.{index}")
        self.wake()

    def abort(self, number: int) -> None:
        """Ask for group ``number`` again, of whoever is free."""
        with self._news:
            self._again(number)
        self.wake()

    def gc(self) -> int:
        """Orphans that were swept when the stream was opened."""
        return self.orphans

    def health(self) -> dict[str, Any]:
        """Counts since the start, and what is held and alive now."""
        with self._news:
            return {
                **self.counts,
                "pool_bytes": sum(a.charge for a in self._asked.values()),
                "pool_limit": self.settings.pool_bytes,
                "groups": len(self._asked),
                "teachers": len(self._teachers),
                "teachers_lost": self._lost,
                "orphans": self.orphans,
                "wait_seconds": self.wait_seconds,
            }

    def _starved(self, number: int) -> StreamError:
        """Which stage keeps group ``number``; called with the lock held."""
        limit = self.settings.stall_seconds
        asked = self._asked.get(number)
        teacher = self._teachers.get(asked.teacher or b"") if asked else None
        stage = "teacher"
        if asked is None:
            stage = "trainer"
            found = (
                "a group that was never asked for: the pool is held by groups that are not acked"
            )
        elif teacher is None:
            refused = "; ".join(self._refused.values())
            found = f"no teacher connected, {self._lost} lost" + (
                f"; refused: {refused}" if refused else ""
            )
        elif teacher.sent > teacher.received:
            stage = "transport"
            found = f"{teacher.name} sent {teacher.sent} records, {teacher.received} arrived"
        else:
            found = f"{teacher.name} is alive and has not finished a row"
        return StreamError(
            expected=f"hidden states within {limit:.0f} s",
            found=found,
            where=f"stage: {stage}",
            fix="Look at that stage's log; raise train.stream.stall_seconds if it is only slow.",
        )

    # --- the thread's side -------------------------------------------------------------------

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
        self._teachers[peer] = _Teacher(name, instance, time.monotonic())
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
        self, peer: bytes, teacher: _Teacher, head: dict[str, Any], parts: list[Part]
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
            self._asked[group.number] = _Asked(group, group.bound)
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

    def finish(self) -> None:
        """The run is over: send the teachers home and close."""
        with self._news:
            peers = list(self._teachers)
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                self.post(0, [peer, *pack({"type": "stop", "session": self.session})])
        self.close()
