"""How far a slow part is: a bar on a terminal, a plain line now and then in a file.

Speed and time left count only what this process did. Whatever lay there already (a resumed stage)
moves the bar and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from dspark.cli.figures import shown_time

Clock = Callable[[], float]

LINE_SECONDS = 30.0
LINES = 10
SHORTEST_SECONDS = 5.0


class Meter:
    """Amounts done, in all and by this process, and what follows for the rest.

    ``total`` None: unknown, so far or for good.
    """

    def __init__(self, total: float | None, clock: Clock = time.monotonic) -> None:
        self.total, self.done, self._own = total, 0.0, 0.0
        self._clock, self.started = clock, clock()
        self._set = False

    def advance(self, amount: float, *, kept: bool) -> None:
        self.done += amount
        self._own += 0.0 if kept else amount

    def set(self, done: float, total: float) -> None:
        """Another count and total. What the first call finds done is no speed: the clock starts."""
        if self._set:
            self._own += done - self.done
        else:
            self._set, self.started = True, self._clock()
        self.done, self.total = done, total

    @property
    def seconds(self) -> float:
        return self._clock() - self.started

    @property
    def rate(self) -> float | None:
        """Done a second by this process; None before anything was."""
        return self._own / self.seconds if self._own > 0 and self.seconds > 0 else None

    @property
    def counts(self) -> str:
        """Done of the total, as text; empty while there is nothing to count."""
        if self.total is None:
            return f"{self.done:,.0f}" if self.done else ""
        return f"{self.done:,.0f}/{self.total:,.0f}"

    @property
    def left(self) -> float | None:
        """Seconds to the end at that rate."""
        rate = self.rate
        if rate is None or self.total is None:
            return None
        return max(self.total - self.done, 0.0) / rate


class Counts(ProgressColumn):
    """Done of how many, as soon as there is something to count."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def render(self, task: Task) -> Text:
        return Text(self._meter.counts, style="progress.download")


class TimeLeft(ProgressColumn):
    """What a meter expects, not rich, which takes a resumed part for speed."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def render(self, task: Task) -> Text:
        left = self._meter.left
        return Text("" if left is None else f"{shown_time(left)} left", style="progress.remaining")


class Bar:
    """What a slow part moves. This one shows nothing; ``advance`` is an
    :class:`~dspark.artifacts.progress.OnDone`."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def advance(self, amount: float = 1, *, kept: bool = False) -> None:
        self.meter.advance(amount, kept=kept)
        self._show("")

    def set(self, done: float, total: float, note: str = "") -> None:
        """``total`` may change (a trainer that has just timed itself)."""
        self.meter.set(done, total)
        self._show(note)

    def start(self) -> None:
        """Before the first amount."""

    def end(self) -> None:
        """After the last."""

    def _show(self, note: str) -> None:
        """Something changed."""


class DrawnBar(Bar):
    """On a terminal."""

    def __init__(self, console: Console, title: str, meter: Meter) -> None:
        super().__init__(meter)
        self._progress = Progress(
            TextColumn(" " * 10),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            Counts(meter),
            TimeElapsedColumn(),
            TimeLeft(meter),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task = self._progress.add_task(title, total=meter.total, note="")

    def start(self) -> None:
        self._progress.start()

    def end(self) -> None:
        self._progress.stop()

    def _show(self, note: str) -> None:
        meter = self.meter
        self._progress.update(self._task, completed=meter.done, total=meter.total, note=note)


class WrittenBar(Bar):
    """In a file or a pipe: a line at the start, then at most one for every tenth and one every half
    minute, and one at the end; no control characters."""

    def __init__(
        self, console: Console, title: str, meter: Meter, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(meter)
        self._console, self._title, self._clock = console, title, clock
        self._begun = self._last = clock()
        self._part, self._note, self._moved = 0, "", False

    def start(self) -> None:
        self._line("...")

    def end(self) -> None:
        if self._moved:
            self._line(f"  {self.meter.counts} in {shown_time(self._clock() - self._begun)}")

    def _show(self, note: str) -> None:
        self._note, self._moved = note, True
        since, part = self._clock() - self._last, int(LINES * self._share())
        further = part > self._part and since >= SHORTEST_SECONDS
        if part < LINES and (further or since >= LINE_SECONDS):
            self._last, self._part = self._clock(), part
            self._line("  " + ", ".join(part for part in self._parts() if part))

    def _share(self) -> float:
        return self.meter.done / self.meter.total if self.meter.total else 0.0

    def _parts(self) -> list[str]:
        rate, left = self.meter.rate, self.meter.left
        return [
            self.meter.counts + (f" ({self._share():.0%})" if self.meter.total else ""),
            "" if rate is None else f"{rate:,.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min",
            "" if left is None else f"{shown_time(left)} left",
            self._note,
        ]

    def _line(self, text: str) -> None:
        # Text, not markup; soft wrap: a log's line stays one line.
        line = Text(f"{'':12}{self._title}{text}")
        self._console.print(line, highlight=False, soft_wrap=True)
