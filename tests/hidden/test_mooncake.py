"""Bodies in a real Mooncake store, where the package and its master are installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("mooncake.store")

from dspark.errors import StreamError
from dspark.hidden.codec import decode, encode
from dspark.hidden.mooncake import MooncakeTransport
from dspark.hidden.transport import open_transport

MASTER = shutil.which("mooncake_master")


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    if MASTER is None:
        pytest.skip("no mooncake_master")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen([MASTER, f"--rpc_port={port}"])
    time.sleep(2)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_a_body_is_stored_read_once_and_gone(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from made_teacher import row, states_of

    monkeypatch.setenv("MOONCAKE_MASTER", master)
    transport = open_transport("mooncake", "teststream")
    assert isinstance(transport, MooncakeTransport)
    record = states_of(row(1))
    notice = transport.put("1.0", encode(record))
    assert decode(transport.get("1.0", notice), "wire").ids.tolist() == record.ids.tolist()
    with pytest.raises(StreamError):
        transport.get("1.0", notice)
    transport.put("2.0", encode(record))
    assert transport.gc() == 1
