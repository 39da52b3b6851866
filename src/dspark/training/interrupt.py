"""Ctrl-C and SIGTERM while training: the step that is done is saved, then the process ends.

Alone, the exception comes at once, wherever the step is: weights only change inside
:meth:`Interrupts.hold`, during which it waits. Among ranks a single one must not leave a collective
that the others are in, so a signal is only noted, and all ranks agree on it between two steps.
A second signal does not wait for anything.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handlers for the length of a ``with`` block; outside the main thread they change nothing."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.caught: int | None = None
        self._held = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.caught = number
        if self.at_once and not self._held:
            self.end()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Weights, step and file change together in here."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.at_once and self.caught is not None and not self._held:
            self.end()

    def end(self) -> None:
        """Leave as the signal would have it: ``KeyboardInterrupt``, or exit status 143."""
        if self.caught == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
