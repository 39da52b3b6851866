"""Who is let in: a bounded queue, and an honest answer to whoever does not fit into it.

The engine decodes ``max_num_seqs`` answers at once; ``max_waiting`` more may wait. Beyond that a
request is refused at once with 429 and a time after which it is likely to fit, instead of waiting
for ever in a queue that only grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from dspark.server.errors import APIError, bad_request


class Gate:
    """Counts answers that are being made or wait; ``refused`` counts requests turned away."""

    def __init__(self, running: int, waiting: int) -> None:
        self.running, self.waiting = running, waiting
        self.inside = 0
        self.refused = 0
        self.seconds = 1.0
        """Smoothed time of an answer, from the first moment to the last."""

    @contextmanager
    def hold(self, answers: int) -> Iterator[None]:
        """Room for ``answers`` while the context is open.

        Raises:
            APIError: 429 when there is no room now, 400 when there never could be.
        """
        room = self.running + self.waiting
        if answers > room:
            self.refused += 1
            raise bad_request(
                f"{answers} answers in one request; this server holds {room} at most.", "n"
            )
        if self.inside + answers > room:
            self.refused += 1
            raise APIError(
                429,
                f"{self.inside} answers are being made or wait; this server holds {room}. "
                "Try again later.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(self._patience(answers))},
            )
        self.inside += answers
        try:
            yield
        finally:
            self.inside -= answers

    def took(self, seconds: float) -> None:
        """An answer took this long."""
        self.seconds += 0.1 * (seconds - self.seconds)

    def _patience(self, answers: int) -> int:
        """Seconds until that many answers should have ended; 1 to 60."""
        return min(60, max(1, math.ceil(self.seconds * answers / self.running)))
