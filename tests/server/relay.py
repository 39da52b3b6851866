"""A wire between client and server that is cut: bytes pass until so many came back."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes connections on to ``port``. Of each that is allowed in ``cuts``, in their order, so
    many bytes of the reply pass and then both ends are reset; later ones pass whole."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port, self._cuts = port, list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """New connections are refused from now on."""
        # Only a shutdown wakes the thread that waits in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                cut = self._cuts.pop(0) if self._cuts else None
                for a, b, limit in ((near, far, None), (far, near, cut)):
                    threading.Thread(target=_pump, args=(a, b, limit), daemon=True).start()


def _pump(source: socket.socket, to: socket.socket, limit: int | None) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := source.recv(256):
            if limit == 0:
                break
            passed += len(data)
            to.sendall(data)
            if limit is not None and passed >= limit:
                break
    for link in (source, to):
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()
