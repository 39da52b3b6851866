"""uvicorn around the app: starts, says that it listens, drains when it is told to stop.

On SIGTERM or Ctrl-C the port is closed at once, what is being answered is answered to its end, and
then the process leaves; after ``drain_seconds``, or at a second signal, it leaves anyway.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI


@dataclass(frozen=True)
class Listen:
    """Where, and how long to drain."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: int = 60
    log_level: str = "info"


def make_server(app: FastAPI, listen: Listen) -> uvicorn.Server:
    """A server that ``run()`` blocks in, or ``serve()`` under asyncio."""
    return uvicorn.Server(
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


def serve(app: FastAPI, listen: Listen, link: socket.socket) -> None:
    """Serve on the bound socket ``link`` until told to stop."""
    make_server(app, listen).run(sockets=[link])
