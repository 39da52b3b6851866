"""How work tells what is done of it; what an earlier process did is no speed of this one."""

from __future__ import annotations

from typing import Protocol


class OnDone(Protocol):
    """Told of ``amount`` more that is done; ``kept``: an earlier process had done it."""

    def __call__(self, amount: float = 1, *, kept: bool = False) -> None: ...


def untold(amount: float = 1, *, kept: bool = False) -> None:
    """Where nobody wants to know."""
