"""How the body of a record gets from a teacher to a trainer: one interface, four kinds.

What is said (who asks for which rows, who is alive) always goes over ZeroMQ
(:mod:`dspark.hidden.stream`). Bodies are megabytes, and where they lie differs:

``tcp``    the body is part of the message; between hosts.
``shm``    a file in memory (``/dev/shm``), of which the message only names the place; one host.
``disk``   the same in a folder on a disk, for pools larger than memory.
``mooncake``  an object in a Mooncake store (:mod:`dspark.hidden.mooncake`).

Every body has one owner at any time: its writer until the reader has opened it, then the reader,
which unlinks a file as soon as it is mapped. So nothing that is in use can expire, and what a
killed process leaves is a file that nobody maps: an orphan, swept at the next start.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from dspark.artifacts import storage_guard
from dspark.errors import ConfigError, StreamError
from dspark.hidden.codec import Part, cut

Kind = Literal["tcp", "shm", "disk", "mooncake"]
SHARED_MEMORY = Path("/dev/shm")
ALIGN = 64


class Transport(Protocol):
    """Bodies of one stream. A writer puts and aborts, a reader gets and acks; both collect.

    ``put`` gives the message parts that lead the reader to the body. ``ack``: the gradient of this
    body is in the optimiser, its memory may go. ``abort``: it will not be read. Both may be told
    twice. ``gc`` removes what nobody owns and says how much; ``health`` counts what is held.
    """

    def put(self, key: str, parts: Sequence[Part]) -> list[Part]: ...

    def get(self, key: str, notice: Sequence[Part]) -> list[Part]: ...

    def ack(self, key: str) -> None: ...

    def abort(self, key: str) -> None: ...

    def gc(self) -> int: ...

    def health(self) -> dict[str, int]: ...


class TcpTransport:
    """Bodies inside the messages. The reader's memory is the message's own until it is acked."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def put(self, key: str, parts: Sequence[Part]) -> list[Part]:
        return list(parts)

    def get(self, key: str, notice: Sequence[Part]) -> list[Part]:
        self._held[key] = sum(memoryview(p).nbytes for p in notice)
        return list(notice)

    def ack(self, key: str) -> None:
        self._held.pop(key, None)

    def abort(self, key: str) -> None:
        self._held.pop(key, None)

    def gc(self) -> int:
        """Messages belong to a connection and end with it: there are no orphans."""
        return 0

    def health(self) -> dict[str, int]:
        return {"records": len(self._held), "bytes": sum(self._held.values())}


class FileTransport:
    """Bodies as files in ``folder`` (memory or disk) named after ``stream``, which is one reader's.

    A writer's file appears whole under its name (written aside, renamed). The notice says name and
    sizes. The reader maps the file privately, so tensors may be changed, and unlinks it at once.
    """

    def __init__(self, folder: Path, stream: str) -> None:
        if not stream.isalnum():
            raise ValueError(f"stream {stream!r} is not a name of letters and digits")
        self.folder, self.prefix = folder, f"dspark-{stream}-"
        self._written: dict[str, Path] = {}
        self._mapped: dict[str, mmap.mmap] = {}

    def put(self, key: str, parts: Sequence[Part]) -> list[Part]:
        """Raises StorageError: no room left (of memory, for ``shm``)."""
        path = self.folder / f"{self.prefix}{secrets.token_hex(8)}"
        sizes = [memoryview(p).nbytes for p in parts]
        with storage_guard(path):
            try:
                with open(f"{path}.partial", "xb") as file:
                    for part, size in zip(parts, sizes, strict=True):
                        file.write(part)
                        file.write(b"\0" * (-size % ALIGN))
                os.rename(f"{path}.partial", path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}.partial")
                raise
        self._written[key] = path
        return [json.dumps({"file": path.name, "sizes": sizes}).encode()]

    def get(self, key: str, notice: Sequence[Part]) -> list[Part]:
        """Raises StreamError: the notice or its file is not there, or cut."""
        try:
            told = json.loads(bytes(notice[0]))
            name, sizes = str(told["file"]), [int(n) for n in told["sizes"]]
            if not name.startswith(self.prefix) or "/" in name or min(sizes) < 0:
                raise ValueError(f"a foreign file {name!r}")
            path = self.folder / name
            with open(path, "rb") as file:
                body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            os.unlink(path)
            if len(body) < sum(n + (-n % ALIGN) for n in sizes):
                raise ValueError(f"a body of {len(body)} bytes")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StreamError(
                expected="a body where the teacher said it is",
                found=f"{type(error).__name__}: {error}",
                where="stage: transport",
                fix="Teacher and trainer must see the same folder; use tcp between hosts.",
            ) from error
        self._mapped[key] = body
        return cut(body, sizes, ALIGN)

    def ack(self, key: str) -> None:
        """Forget the mapping; the memory goes with the last tensor that looks into it."""
        self._mapped.pop(key, None)
        self._written.pop(key, None)

    def abort(self, key: str) -> None:
        path = self._written.pop(key, None)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        self._mapped.pop(key, None)

    def gc(self) -> int:
        """Remove files of this stream that no reader has opened. Only before a stream starts."""
        removed = 0
        for path in self.folder.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def health(self) -> dict[str, int]:
        return {"records": len(self._mapped), "bytes": sum(len(m) for m in self._mapped.values())}


def open_transport(kind: Kind, stream: str, folder: Path | None = None) -> Transport:
    """The transport of one stream (a name of letters and digits, the same at both ends).

    Raises:
        ConfigError: ``shm`` on a system without it, or ``disk`` without a folder.
        MissingDependencyError: ``mooncake`` without its package.
    """
    if kind == "tcp":
        return TcpTransport()
    if kind == "mooncake":
        from dspark.hidden.mooncake import MooncakeTransport

        return MooncakeTransport(stream)
    place = SHARED_MEMORY if kind == "shm" else folder
    if place is None or not place.is_dir():
        raise ConfigError(
            expected="a folder that teacher and trainer both see",
            found=f"{place}, which is not there" if place else "none",
            where="stream.transport" if kind == "shm" else "stream.folder",
            fix="Use transport tcp, or name an existing folder.",
        )
    return FileTransport(place, stream)
