"""The stream between real processes: every row once, bounded, whoever dies, and never silent.

Teachers are processes (``made_teacher``); the reader is the trainer's real end of the wire.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_teacher import TEACHING, Process, folder_files, groups, row, settle, states_of

from dspark.errors import ConfigError, DamagedArtifactError, StreamError
from dspark.hidden.codec import decode, encode, record_bytes
from dspark.hidden.reader import StreamReader, StreamSettings
from dspark.hidden.record import HiddenRecord
from dspark.hidden.transport import FileTransport, Kind, open_transport
from endpoints import free_endpoint

KINDS: tuple[Kind, ...] = ("tcp", "shm", "disk")


def reader(folder: Path, count: int = 12, **changes: Any) -> StreamReader:
    values: dict[str, Any] = {
        "endpoint": free_endpoint(),
        "pool_bytes": 40_000,
        "window_bytes": 20_000,
        "folder": folder,
        "stream": f"test{os.getpid()}",
        "dead_seconds": 2.0,
        "stall_seconds": 20.0,
    } | changes
    return StreamReader(StreamSettings(**values), TEACHING, groups(count))


@pytest.fixture
def closing() -> Iterator[list[StreamReader]]:
    """Readers that a failed test must not leave open."""
    opened: list[StreamReader] = []
    yield opened
    for one in opened:
        one.close()


def assert_same(found: HiddenRecord, wanted: HiddenRecord) -> None:
    for name, value in vars(wanted).items():
        other = getattr(found, name)
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype, name
            assert torch.equal(other, value), name
        else:
            assert other == value, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_arrives_once_whole_and_in_the_plan_s_order(
    tmp_path: Path, closing: list[StreamReader], kind: Kind
) -> None:
    stream = reader(tmp_path, transport=kind)
    closing.append(stream)
    with Process(stream.settings.endpoint) as teacher:
        for number in range(12):
            records = stream.get(number)
            for i, record in enumerate(records):
                assert_same(record, states_of(row(2 * number + i)))
            # The bound holds whatever is asked for ahead, and is used.
            assert stream.health()["pool_bytes"] <= 40_000
            if number == 4:
                settle(lambda: stream.health()["groups"] > 2)
            stream.ack(number)
        health = stream.health()
        assert (health["records"], health["strays"], health["asked_again"]) == (24, 0, 0)
        assert health["groups"] == 0
        stream.finish()
        assert teacher.popen.wait(20) == 0  # sent home, not shot
    assert folder_files(tmp_path) == []


@pytest.mark.slow
def test_a_killed_teacher_s_groups_go_to_another_and_none_is_lost_or_doubled(
    tmp_path: Path, closing: list[StreamReader]
) -> None:
    stream = reader(tmp_path, transport="disk")
    closing.append(stream)
    endpoint = stream.settings.endpoint
    with Process(endpoint, "dies", "dies"), Process(endpoint, "lives", "slow"):
        settle(lambda: stream.health()["teachers"] == 2)
        for number in range(12):
            records = stream.get(number)
            assert [r.id for r in records] == [row(2 * number + i).id for i in range(2)]
            for i, record in enumerate(records):
                assert_same(record, states_of(row(2 * number + i)))
            stream.ack(number)
        assert stream.health()["teachers_lost"] == 1
        assert stream.health()["asked_again"] >= 1


@pytest.mark.slow
def test_a_teacher_outlives_its_trainer_and_serves_the_next_one(
    tmp_path: Path, closing: list[StreamReader]
) -> None:
    first = reader(tmp_path, transport="disk")
    closing.append(first)
    with Process(first.settings.endpoint, "one", "slow") as teacher:
        first.get(0)
        first.close()  # without a word: as if it had been killed
        settle(lambda: len(folder_files(tmp_path)) > 0 or teacher.popen.poll() is not None, 1.0)
        second = reader(tmp_path, transport="disk", endpoint=first.settings.endpoint)
        closing.append(second)
        for number in range(4):
            assert_same(second.get(number)[0], states_of(row(2 * number)))
            second.ack(number)
        assert teacher.popen.poll() is None


@pytest.mark.parametrize(
    ("behaviour", "stage", "found"),
    [
        ("none", "stage: teacher", "no teacher connected"),
        ("asleep", "stage: teacher", "is alive"),
        ("loses", "stage: transport", "0 arrived"),
        ("refuses", "stage: teacher one", "no such layer"),
    ],
)
def test_the_starving_stage_is_named(
    tmp_path: Path, closing: list[StreamReader], behaviour: str, stage: str, found: str
) -> None:
    stream = reader(tmp_path, stall_seconds=1.0)
    closing.append(stream)

    def fails() -> None:
        with pytest.raises(StreamError) as caught:
            stream.get(0)
        assert caught.value.where == stage
        assert found in caught.value.found

    if behaviour == "none":
        fails()
    else:
        with Process(stream.settings.endpoint, "one", behaviour):
            settle(lambda: stream.health()["teachers"] == 1)
            fails()


def test_waiting_for_groups_that_are_never_acked_names_the_trainer(
    tmp_path: Path, closing: list[StreamReader]
) -> None:
    stream = reader(tmp_path, stall_seconds=1.5, pool_bytes=20_000)
    closing.append(stream)
    with Process(stream.settings.endpoint):
        settle(lambda: stream.health()["teachers"] == 1)
        stream.get(0)
        with pytest.raises(StreamError) as caught:
            stream.get(11)
    assert caught.value.where == "stage: trainer"


def test_a_teacher_of_other_layers_is_refused_before_it_computes(
    tmp_path: Path, closing: list[StreamReader]
) -> None:
    stream = reader(tmp_path)
    closing.append(stream)
    with Process(stream.settings.endpoint, "one", "shifted") as teacher:
        assert teacher.popen.wait(20) != 0
        assert teacher.popen.stderr is not None
        assert "layer_ids [2, 5, 8] instead of [1, 4, 7]" in teacher.popen.stderr.read()
    assert stream.health()["records"] == 0


@pytest.mark.slow
def test_a_second_writer_of_one_name_is_refused(
    tmp_path: Path, closing: list[StreamReader]
) -> None:
    stream = reader(tmp_path)
    closing.append(stream)
    with Process(stream.settings.endpoint, "same", "asleep"):
        settle(lambda: stream.health()["teachers"] == 1)
        with Process(stream.settings.endpoint, "same") as second:
            assert second.popen.wait(20) != 0
            assert second.popen.stderr is not None
            assert "a second writer called same" in second.popen.stderr.read()


def test_a_pool_below_one_optimiser_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        reader(tmp_path, pool_bytes=19_999)
    assert "deadlock" in str(caught.value) or "one optimiser window" in caught.value.expected


def test_a_taken_endpoint_is_refused(tmp_path: Path, closing: list[StreamReader]) -> None:
    stream = reader(tmp_path)
    closing.append(stream)
    with pytest.raises(StreamError, match="free endpoint"):
        reader(tmp_path, endpoint=stream.settings.endpoint)


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_orphans_are_swept_at_the_start_and_only_those_of_this_stream(
    tmp_path: Path, closing: list[StreamReader], kind: Kind
) -> None:
    name = f"orphans{os.getpid()}"
    mine = open_transport(kind, name, tmp_path)
    other = open_transport(kind, f"{name}x", tmp_path)
    assert isinstance(mine, FileTransport)
    assert isinstance(other, FileTransport)
    mine.put("a", [b"left by a writer that died"])
    kept = other.put("b", [b"somebody else's"])
    try:
        stream = reader(tmp_path, transport=kind, stream=name)
        closing.append(stream)
        assert stream.gc() == 1
        assert list(mine.folder.glob(f"{mine.prefix}*")) == []
        assert bytes(other.get("b", kept)[0]) == b"somebody else's"
    finally:
        other.gc()


def test_a_stranger_on_the_port_ends_nothing(tmp_path: Path, closing: list[StreamReader]) -> None:
    stream = reader(tmp_path, 2)
    closing.append(stream)
    host, port = stream.settings.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.connect(stream.settings.endpoint)
        for frames in ([b"{"], [b"[]"], [b'{"type": "hello"}'], [b'{"type": "record"}'], [b""]):
            dealer.send_multipart(frames)
        with Process(stream.settings.endpoint):
            assert [r.id for r in stream.get(1)] == [row(2).id, row(3).id]


# --- the codec -----------------------------------------------------------------------------------


def test_the_codec_keeps_every_bit_and_its_bound() -> None:
    record = states_of(row(3))
    parts = encode(record)
    assert_same(decode(parts, "wire"), record)
    size = sum(memoryview(p).nbytes for p in parts)
    assert size <= record_bytes(len(record), len(record) - 6, 3, 16, 2)


def test_final_states_travel_only_where_they_are_used() -> None:
    record = states_of(row(3))
    full = replace(record, final=torch.ones_like(record.final))
    got = decode(encode(full), "wire").final
    used = torch.zeros(len(record), dtype=torch.bool)
    used[5:-1] = True  # the state at t is the distribution of token t + 1
    assert torch.equal(got[used], full.final[used])
    assert not bool(got[~used].any())


def test_fp8_taps_are_near_and_half_as_large() -> None:
    record = states_of(row(3))
    small, plain = encode(record, "fp8"), encode(record)
    got = decode(small, "wire").taps.float()
    error = (got - record.taps.float()).norm() / record.taps.float().norm()
    assert 0.005 < float(error) < 0.04
    assert memoryview(small[-2]).nbytes * 2 == memoryview(plain[-1]).nbytes


@pytest.mark.parametrize("part", range(7))
def test_a_changed_byte_anywhere_is_found(part: int) -> None:
    parts = [bytearray(p) for p in encode(states_of(row(3)))]
    parts[part][len(parts[part]) // 2] ^= 1
    with pytest.raises(DamagedArtifactError):
        decode([bytes(p) for p in parts], "wire")


@pytest.mark.parametrize("keep", [0, 1, 6])
def test_a_cut_message_is_found(keep: int) -> None:
    with pytest.raises(DamagedArtifactError):
        decode(encode(states_of(row(3)))[:keep], "wire")


def test_unsound_states_are_not_sent() -> None:
    record = states_of(row(3))
    record.taps[2, 0, 0] = float("nan")
    with pytest.raises(DamagedArtifactError):
        encode(record)


def test_a_foreign_file_name_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 100)
    transport = FileTransport(tmp_path, "mine")
    for name in ("secret", "../secret", "dspark-mine-../../secret", "dspark-mine-absent"):
        with pytest.raises(StreamError):
            transport.get("k", [f'{{"file": "{name}", "sizes": [4]}}'.encode()])
    assert (tmp_path / "secret").exists()
