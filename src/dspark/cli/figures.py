"""Figures of plans as people read them: fitting units, and tables that never cut a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text


def figures_table(title: str, names: Sequence[str], left: Sequence[str] = ()) -> Table:
    """A table whose cells are never cut: headers wrap, and what is still too wide is folded."""
    table = Table(title=Text(title), title_justify="left")
    for name in names:
        # Broken here: rich would take the width of a long header from its neighbours' figures.
        side: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(name.replace(" ", "\n"), justify=side, overflow="fold")
    return table


def shown_time(seconds: float) -> str:
    """Seconds with a fitting unit: ``12.0 s``, ``3.5 min``, ``7.2 h``, ``12.0 days``."""
    for size, unit, limit in (
        (1, "s", 60),
        (60, "min", 90 * 60),
        (3600, "h", 48 * 3600),
        (86400, "days", 2 * 365 * 86400),
    ):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / (365.25 * 86400):,.1f} years"


def shown_bytes(value: float) -> str:
    """Bytes with a decimal unit, as disks are sold: ``0 B``, ``1.5 MB``, ``2.0 PB``."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} EB"
