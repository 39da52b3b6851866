"""The teacher's end of a stream: it serves every rank of a trainer, and outlives its restarts.

One link is one writer: of a target that runs on many devices, only the rank that holds the states
opens it. A thread answers for the teacher while it computes, so that a trainer can tell a slow
teacher from a dead one.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from dspark.errors import StreamError
from dspark.hidden.codec import Part, TapsCoding, encode
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row, Teaching
from dspark.hidden.transport import Transport, open_transport

BEAT = 0.5  # seconds


@dataclass(frozen=True)
class Work:
    """A group as one trainer rank asked for it."""

    rank: int
    session: str
    number: int
    rows: tuple[Row, ...]


@dataclass
class _Trainer:
    """One endpoint."""

    session: str | None = None
    transport: Transport | None = None
    taps: TapsCoding = "stored"
    sent: int = 0
    stopped: bool = False
    introduced: float = 0.0


class TeacherLink(Postman):
    """Connected to ``endpoints``, one per trainer rank. ``name`` must be this writer's alone.

    ``lost_seconds`` without a word from any trainer end it: a teacher must not run for nobody.
    """

    def __init__(
        self,
        endpoints: list[str],
        teaching: Teaching,
        *,
        name: str | None = None,
        lost_seconds: float = 600.0,
    ) -> None:
        super().__init__("teacher-link")
        self.teaching, self.lost_seconds = teaching, lost_seconds
        self.name = name or f"{platform.node()}-{os.getpid()}-{secrets.token_hex(2)}"
        # A connection that broke comes back as a stranger; this says it is still the same writer.
        self.instance = secrets.token_hex(8)
        self._trainers = [_Trainer() for _ in endpoints]
        self._work: deque[Work] = deque()
        self._heard, self._beaten = time.monotonic(), 0.0
        self.records = 0
        for endpoint in endpoints:
            socket = self.add_socket(zmq.DEALER)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            socket.connect(endpoint)
        self.start()

    def next(self) -> Work | None:
        """The next group to compute; None when every trainer has finished.

        Raises:
            StreamError: refused by a trainer, or no trainer was heard of for ``lost_seconds``.
        """
        with self._news:
            while True:
                self._raise_fault()
                if self._work:
                    return self._work.popleft()
                if all(t.stopped for t in self._trainers):
                    return None
                silent = time.monotonic() - self._heard
                if silent > self.lost_seconds:
                    raise StreamError(
                        expected=f"a trainer within {self.lost_seconds:.0f} s",
                        found=f"none for {silent:.0f} s",
                        where="stage: trainer",
                        fix="Start the trainer, or see its log.",
                    )
                self._news.wait(0.2)

    def wanted(self, work: Work) -> bool:
        """Whether the trainer that asked is still the same one."""
        return self._trainers[work.rank].session == work.session

    def put(self, work: Work, index: int, record: HiddenRecord) -> None:
        """Send the record of row ``index``; dropped when its trainer has gone.

        Raises:
            DamagedArtifactError: the record is not sound; nothing is sent.
            StorageError: no room left where bodies lie.
        """
        trainer = self._trainers[work.rank]
        parts = encode(record, trainer.taps)
        with self._news:
            if not self.wanted(work) or trainer.transport is None:
                return
            notice = trainer.transport.put(f"{work.number}.{index}", parts)
            # Counted before it leaves: a count ahead of the arrivals is what names the transport.
            trainer.sent += 1
        self.records += 1
        size = sum(memoryview(p).nbytes for p in parts)
        head = {
            "type": "record",
            "session": work.session,
            "group": work.number,
            "index": index,
            "bytes": size,
            "tokens": len(record),
        }
        self.post(work.rank, pack(head, notice))

    def refuse(self, work: Work, error: str) -> None:
        """Say that a group cannot be made here."""
        head = {"type": "failed", "session": work.session, "group": work.number, "error": error}
        self.post(work.rank, pack(head))

    # --- the thread's side -------------------------------------------------------------------

    def received(self, socket: int, frames: list[Part]) -> None:
        head, _ = unpack(frames)
        trainer = self._trainers[socket]
        with self._news:
            self._heard = time.monotonic()
            kind = head["type"]
            if kind == "who":
                self._forget(socket)
            elif kind == "welcome":
                self._welcome(trainer, head)
            elif kind == "work" and head["session"] == trainer.session:
                rows = tuple(_row(row) for row in head["rows"])
                self._work.append(Work(socket, head["session"], int(head["group"]), rows))
            elif kind == "stop" and head["session"] == trainer.session:
                trainer.stopped = True
            elif kind == "refuse":
                self._error = StreamError(
                    expected="a teacher that fits the trainer",
                    found=str(head["found"]),
                    where=f"stage: teacher {self.name}",
                    fix="Start it from the recipe that is trained.",
                )
            self._news.notify_all()

    def _welcome(self, trainer: _Trainer, head: dict[str, Any]) -> None:
        folder = head["folder"]
        trainer.session, trainer.sent = str(head["session"]), 0
        trainer.taps = head["taps"]
        trainer.transport = open_transport(
            head["transport"], head["stream"], None if folder is None else Path(folder)
        )

    def _forget(self, rank: int) -> None:
        """A trainer that does not know us has restarted: what it asked for before is void."""
        trainer = self._trainers[rank]
        trainer.session, trainer.transport, trainer.introduced = None, None, 0.0
        self._work = deque(w for w in self._work if w.rank != rank)

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._beaten < BEAT:
            return
        self._beaten = now
        with self._news:
            for rank, trainer in enumerate(self._trainers):
                if trainer.stopped:
                    continue
                if trainer.session is not None:
                    beat = {"type": "beat", "session": trainer.session, "sent": trainer.sent}
                    self.post(rank, pack(beat))
                elif now - trainer.introduced > 4 * BEAT:
                    trainer.introduced = now
                    hello = {"type": "hello", "teacher": self.name, "instance": self.instance}
                    self.post(rank, pack({**hello, **self.teaching.told()}))

    def failed(self) -> None:
        with self._news:
            self._news.notify_all()

    def ended(self) -> None:
        for rank, trainer in enumerate(self._trainers):
            if trainer.session is not None and not trainer.stopped:
                self.post(rank, pack({"type": "bye", "session": trainer.session}))


def _row(raw: dict[str, Any]) -> Row:
    return Row(**{**raw, "ids": tuple(raw["ids"]), "loss_mask": tuple(raw["loss_mask"])})
