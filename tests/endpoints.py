"""Free places to listen at, for tests with several processes."""

from __future__ import annotations

import socket


def free_endpoint() -> str:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"
