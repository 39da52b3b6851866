"""Bodies in a Mooncake store, for clusters with RDMA: an optional extra.

Each body is one object, put by the teacher and removed by the reader as soon as it is read: no
object depends on the store's time to live (a store that dropped what was in use, and pools that
filled with what nobody would read, are what ended public runs). The metadata server and the master
are named by the environment variables that Mooncake's own tools use.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from dspark.errors import MissingDependencyError, StreamError
from dspark.hidden.codec import Part, cut


def _connect() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            expected="the package mooncake-transfer-engine (or its non-cuda build)",
            found=str(error),
            where="train.stream.transport: mooncake",
            fix="pip install 'dspark[mooncake]' (and the system's libibverbs1), or use tcp.",
        ) from error
    store = MooncakeDistributedStore()
    environ = os.environ
    code = store.setup(
        environ.get("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
        environ.get("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
        int(environ.get("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(1 << 30))),
        int(environ.get("MOONCAKE_LOCAL_BUFFER_SIZE", str(1 << 28))),
        environ.get("MOONCAKE_PROTOCOL", "tcp"),
        environ.get("MOONCAKE_DEVICE", ""),
        environ.get("MOONCAKE_MASTER", "127.0.0.1:50051"),
    )
    if code != 0:
        raise StreamError(
            expected="a Mooncake master and metadata server",
            found=f"setup returned {code}",
            where="stage: transport",
            fix="Set MOONCAKE_MASTER and MOONCAKE_TE_META_DATA_SERVER, and start mooncake_master.",
        )
    return store


class MooncakeTransport:
    """Objects named after ``stream``; the notice carries their name and sizes of parts."""

    def __init__(self, stream: str, store: Any = None) -> None:
        self.store = _connect() if store is None else store
        self.prefix = f"dspark-{stream}-"
        self._written: dict[str, str] = {}
        self._held: dict[str, int] = {}

    def put(self, key: str, parts: Sequence[Part]) -> list[Part]:
        """Raises StreamError: the store is full or gone."""
        name = f"{self.prefix}{secrets.token_hex(8)}"
        code = self.store.put(name, b"".join(bytes(p) for p in parts))
        if code != 0:
            raise StreamError(
                expected="room in the Mooncake store",
                found=f"put returned {code}",
                where="stage: transport",
                fix="Raise MOONCAKE_GLOBAL_SEGMENT_SIZE, or lower train.stream.pool_gb.",
            )
        self._written[key] = name
        sizes = [memoryview(p).nbytes for p in parts]
        return [json.dumps({"object": name, "sizes": sizes}).encode()]

    def get(self, key: str, notice: Sequence[Part]) -> list[Part]:
        """Raises StreamError: the object is not there, or cut."""
        try:
            told = json.loads(bytes(notice[0]))
            name, sizes = str(told["object"]), [int(n) for n in told["sizes"]]
            if not name.startswith(self.prefix):
                raise ValueError(f"a foreign object {name!r}")
            body = bytearray(self.store.get(name))
            if len(body) != sum(sizes) or min(sizes) < 0:
                raise ValueError(f"{len(body)} bytes instead of {sum(sizes)}")
        except (ValueError, LookupError, TypeError) as error:
            raise StreamError(
                expected="a body where the teacher said it is",
                found=f"{type(error).__name__}: {error}",
                where="stage: transport",
                fix="See the logs of mooncake_master.",
            ) from error
        self.store.remove(name)
        self._held[key] = len(body)
        return cut(body, sizes)

    def ack(self, key: str) -> None:
        self._held.pop(key, None)
        self._written.pop(key, None)

    def abort(self, key: str) -> None:
        name = self._written.pop(key, None)
        if name is not None:
            self.store.remove(name)
        self._held.pop(key, None)

    def gc(self) -> int:
        """Remove what an earlier reader of this stream left."""
        return max(0, int(self.store.remove_by_regex(f"^{self.prefix}.*")))

    def health(self) -> dict[str, int]:
        return {"records": len(self._held), "bytes": sum(self._held.values())}
