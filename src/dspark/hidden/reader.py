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
import time
from collections.abc import Iterator
from typing import Any

from dspark.errors import DamagedArtifactError, StreamError
from dspark.hidden.codec import decode
from dspark.hidden.desk import ATTEMPTS, Asked, Desk, StreamSettings
from dspark.hidden.mail import pack
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Group

__all__ = ["StreamReader", "StreamSettings"]


class StreamReader(Desk):
    """Groups in the order they are asked for; each is kept until it is acked."""

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

    def _await(self, number: int, began: float) -> Asked:
        with self._news:
            while True:
                self._raise_fault()
                asked = self._asked.get(number)
                if asked is not None and asked.whole:
                    return asked
                since = max(began, self._progress)
                if time.monotonic() - since > self.settings.stall_seconds:
                    raise self._starved(number)
                self._news.wait(0.2)

    def _open(self, asked: Asked, index: int) -> HiddenRecord:
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
            (given != row.ids and not row.asked)
            or len(record) > row.longest
            or (row.new_tokens == 0 and len(record) != len(row.ids))
        ):
            faults.append(f"{len(record)} tokens that are not the ones asked for")
        if row.new_tokens == 0 and tuple(record.loss_mask.tolist()) != row.mask:
            faults.append("another loss mask")
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

    def finish(self) -> None:
        """The run is over: send the teachers home and close."""
        with self._news:
            peers = list(self._teachers)
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                self.post(0, [peer, *pack({"type": "stop", "session": self.session})])
        self.close()
