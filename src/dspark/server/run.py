"""uvicorn around the app: starts, says that it listens, drains when it is told to stop.

On SIGTERM or Ctrl-C the port is closed at once, what is being answered is answered to its end, and
then the process leaves; after ``drain_seconds``, or at a second signal, it leaves anyway.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.applications import Starlette

LOG = logging.getLogger("dspark.server")


@dataclass(frozen=True)
class Listen:
    """Where, and how long to drain."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: int = 60
    log_level: str = "info"


class _Server(uvicorn.Server):
    """uvicorn raises the signal again once it has drained, which looks like a death; a server that
    was told to stop and did has ended well."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        again = "; again to leave at once" if not self.should_exit else ""
        LOG.warning("%s: answering what was begun, then leaving%s", signal.strsignal(number), again)
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def make_server(app: Starlette, listen: Listen) -> uvicorn.Server:
    """A server that ``run()`` blocks in, or ``serve()`` under asyncio."""
    return _Server(
        uvicorn.Config(
            app,
            host=listen.host,
            port=listen.port,
            log_level=listen.log_level,
            timeout_graceful_shutdown=listen.drain_seconds,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
        )
    )


def serve(app: Starlette, listen: Listen, link: socket.socket) -> None:
    """Serve on the bound socket ``link`` until told to stop."""
    make_server(app, listen).run(sockets=[link])
