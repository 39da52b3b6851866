"""What a person sees while stages run: one line per stage and a progress bar for the slow parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dspark.artifacts.progress import OnDone
from dspark.cli.progress import Bar, DrawnBar, Meter, WrittenBar


def print_fault(
    console: Console, label: str, where: str, expected: str, found: str, fix: str
) -> None:
    """The four parts of an error, each on a line of its own; ``label`` heads the first."""
    rows = ((label, where), ("expected", expected), ("found", found), ("what to do", fix))
    for name, text in rows:
        style = "bold red" if name == label else "bold"
        console.print(Text.assemble((f"{name:>11}  ", style), text), highlight=False)


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
    def byte_bar(self, title: str, total: int) -> Iterator[OnDone]:
        """A bar over ``total`` bytes, shown in MB; what it yields takes numbers of bytes."""
        with self.bar(f"{title} (MB)", total / 1_000_000) as bar:

            def on_bytes(amount: float = 1, *, kept: bool = False) -> None:
                bar.advance(amount / 1_000_000, kept=kept)

            yield on_bytes

    @contextmanager
    def bar(self, title: str, total: float | None) -> Iterator[Bar]:
        """A running bar; ``total`` None: not known, or not yet."""
        kind = DrawnBar if self.console.is_interactive else WrittenBar
        bar = kind(self.console, title, Meter(total))
        bar.start()
        try:
            yield bar
        finally:
            bar.end()
