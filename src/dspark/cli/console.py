"""What a person sees while stages run: one line per stage and a progress bar for the slow parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


def print_fault(
    console: Console, label: str, where: str, expected: str, found: str, fix: str
) -> None:
    """The four parts of an error, each on a line of its own; ``label`` heads the first."""
    rows = ((label, where), ("expected", expected), ("found", found), ("what to do", fix))
    for name, text in rows:
        style = "bold red" if name == label else "bold"
        console.print(Text.assemble((f"{name:>11}  ", style), text), highlight=False)


class Bar:
    """A running progress bar; ``total`` may change (a trainer that has just timed itself)."""

    def __init__(self, progress: Progress, title: str, total: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="")

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def set(self, done: float, total: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, note=note)


class Screen:
    """Prints stages and bars; plain lines when the output is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def stage(self, name: str, text: str) -> None:
        # Text, not markup: paths and names may hold brackets.
        line = Text.assemble((f"{name:>10}", "bold"), "  ", text)
        self.console.print(line, highlight=False)

    def path(self, name: str, where: Path) -> None:
        """A place on disk, whole and on one line, to be copied from the screen."""
        # Text, not markup: a folder may be called anything. Soft wrap: never cut by dspark.
        self.console.print(
            Text(f"{name:>10}", style="bold").append(f"  {where}", style="bold"),
            highlight=False,
            soft_wrap=True,
        )

    @contextmanager
    def byte_bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over ``total`` bytes, shown in MB; what it yields takes numbers of bytes."""
        with self.bar(f"{title} (MB)", total // 1_000_000) as bar:
            yield lambda count: bar.advance(count / 1_000_000)

    @contextmanager
    def bar(self, title: str, total: float | None) -> Iterator[Bar]:
        progress = Progress(
            TextColumn(" " * 10),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            *([] if total is None else [MofNCompleteColumn()]),
            TimeElapsedColumn(),
            *([] if total is None else [TimeRemainingColumn(compact=True)]),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        with progress:
            yield Bar(progress, title, total)
