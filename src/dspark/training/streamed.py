"""Training on a live stream: the same plan, whose states come from teachers while it runs.

The plan is made of rows before any state exists, so order, micro-batches and anchors are functions
of seed and number exactly as they are for states on disk; replayed, streamed online and read from
disk, the same rows give the same losses.

A few rows are asked for before training begins: *held* rows, which stay in memory for evaluation,
and *warm* rows (the first of the plan), which the self-test and the closed-form starts look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.config.recipe import TrainSection
from dspark.errors import TrainingError
from dspark.hidden.codec import record_bytes
from dspark.hidden.reader import StreamReader, StreamSettings
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Group, Row, Teaching
from dspark.training.anchors import eligible
from dspark.training.batches import MicroBatch, Order, cut_rows
from dspark.training.parallel import Solo

HELD_SHARE = 24  # as dspark.training.batches.split_validation


@dataclass(frozen=True)
class Sizes:
    """What a row's bytes follow from: taps, hidden size, bytes per element of what is captured."""

    layers: int
    hidden: int
    width: int


def split_rows(rows: Sequence[Row], most: int) -> tuple[list[Row], list[Row]]:
    """Every 24th row by id is held back, but no more than ``most``: (trained, held).

    Raises:
        TrainingError: fewer than two rows.
    """
    ordered = sorted(rows, key=lambda r: r.id)
    if len(ordered) < 2:
        raise TrainingError(
            expected="at least two rows",
            found=str(len(ordered)),
            where="training data",
            fix="Generate more prompts.",
        )
    held = ordered[:: max(2, min(HELD_SHARE, len(ordered)))][:most]
    names = {r.id for r in held}
    return [r for r in ordered if r.id not in names], held


class StreamPlan:
    """Micro-batches of rows whose states a :class:`StreamReader` brings; one per trainer rank."""

    def __init__(
        self,
        rows: Sequence[Row],
        section: TrainSection,
        block_size: int,
        sizes: Sizes,
        group: Solo,
        *,
        normed: Callable[[HiddenRecord], HiddenRecord] = lambda record: record,
    ) -> None:
        self.rows, self.held = split_rows(rows, section.stream.held_rows)
        self.section, self.block_size, self.sizes, self.group = section, block_size, sizes, group
        self.order = self._order()
        self.normed = normed
        self._reader: StreamReader | None = None
        self._warm = self._warm_groups()

    def _order(self) -> Order:
        section = self.section
        return Order(
            len(self.rows),
            [len(r.ids) for r in self.rows] if section.order == "length" else None,
            batch_size=section.batch_size,
            seed=section.seed,
            batch_tokens=section.batch_tokens,
        )

    # --- bytes -------------------------------------------------------------------------------

    def bound(self, rows: Sequence[Row]) -> int:
        """Upper bound of the bytes of ``rows``' records."""
        s, taps = self.sizes, self.section.stream.taps
        return sum(
            record_bytes(r.longest, r.answer + 1, s.layers, s.hidden, s.width, taps) for r in rows
        )

    @property
    def window_bytes(self) -> int:
        """Upper bound of what one rank holds of any optimiser window."""
        # A batch has no more rows than its longest row allows, and none of them is larger.
        batch = self.section.batch_of
        longest = max(self.bound([r]) * batch(r.longest) for r in (*self.rows, *self.held))
        batches = self.section.accumulate // self.group.size
        return longest * batches

    def settings(self, endpoint: str, stream: str, folder: Path) -> StreamSettings:
        """How this rank listens at ``endpoint``; bodies of transport ``disk`` lie in ``folder``."""
        own = self.section.stream
        return StreamSettings(
            endpoint=endpoint,
            pool_bytes=int(own.pool_gb * 1e9),
            window_bytes=self.window_bytes,
            transport=own.transport,
            folder=folder if own.transport == "disk" else None,
            stream=stream,
            taps=own.taps,
            dead_seconds=own.dead_seconds,
            stall_seconds=own.stall_seconds,
        )

    # --- before training ---------------------------------------------------------------------

    def _cut(self, rows: Sequence[Row], first: int) -> list[Group]:
        """Groups numbered downwards from ``first``: micro-batches count up from 0."""
        parts = [tuple(rows[s]) for s in cut_rows([r.longest for r in rows], self.section)]
        return [Group(first - i, part, self.bound(part)) for i, part in enumerate(parts)]

    def _warm_groups(self) -> tuple[list[Group], list[Group]]:
        held = self._cut(self.held, -1)
        first: list[Row] = []
        for number in range(self.per_epoch):
            if len(first) >= self.section.stream.warm_rows:
                break
            first += [self.rows[i] for i in self.order.at(number)]
        first = first[: self.section.stream.warm_rows]
        return held, self._cut(first, -1 - len(held))

    def open(self, settings: StreamSettings, teaching: Teaching) -> None:
        """Listen; held and warm rows are asked for at once.

        Raises:
            ConfigError: the pool is smaller than one optimiser window.
            StreamError: the endpoint is taken.
        """
        held, warm = self._warm
        self._reader = StreamReader(settings, teaching, iter([*held, *warm]))

    @property
    def reader(self) -> StreamReader:
        assert self._reader is not None, "open() comes first"
        return self._reader

    def _taken(self, groups: Sequence[Group]) -> list[HiddenRecord]:
        found = []
        for group in groups:
            found += [_own(record) for record in self.reader.get(group.number)]
            self.reader.ack(group.number)
        return [r for r in found if len(eligible(r.loss_mask))]

    def take_held(self) -> list[HiddenRecord]:
        """Rows for evaluation, as they were captured; to be called before :meth:`take_warm`."""
        return self._taken(self._warm[0])

    def take_warm(self) -> list[HiddenRecord]:
        """Rows for self-test and starts, as they were captured."""
        return self._taken(self._warm[1])

    # --- as a plan ---------------------------------------------------------------------------

    @property
    def per_epoch(self) -> int:
        return self.order.per_epoch

    def begin(self, first: int, last: int) -> None:
        self.reader.ask(self._groups(first, last))

    def _groups(self, first: int, last: int) -> Iterator[Group]:
        # The order keeps one epoch at a time, and the reader's thread runs ahead of the trainer.
        order = self._order()
        for number in range(first, last):
            if number % self.group.size == self.group.rank:
                rows = tuple(self.rows[i] for i in order.at(number))
                yield Group(number, rows, self.bound(rows))

    def micro_batch(self, number: int) -> MicroBatch:
        """Waits for it. Raises as :meth:`StreamReader.get`."""
        return MicroBatch.sample(
            number,
            [self.normed(record) for record in self.reader.get(number)],
            num_anchors=self.section.num_anchors,
            block_size=self.block_size,
            seed=self.section.seed,
            packed=self.section.packed,
        )

    def release(self, number: int) -> None:
        self.reader.ack(number)

    def status(self) -> dict[str, float]:
        return {f"stream_{k}": float(v) for k, v in self.reader.health().items()}

    def finish(self) -> None:
        """Send the teachers home."""
        if self._reader is not None:
            self._reader.finish()

    def close(self) -> None:
        """Leave; teachers wait for a trainer that resumes."""
        if self._reader is not None:
            self._reader.close()


def _own(record: HiddenRecord) -> HiddenRecord:
    """A copy that does not hold on to the body it came in."""
    names = ("ids", "loss_mask", "taps", "final", "greedy", "log_z")
    return replace(record, **{name: getattr(record, name).clone() for name in names})
