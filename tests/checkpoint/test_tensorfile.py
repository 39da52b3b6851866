"""Safetensors files of strangers: a sound one is read as the library reads it, any other refused.

The library is the oracle: whatever our reader accepts, it must accept too, with the same tensors.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from dspark.checkpoint.tensorfile import HEADER_LIMIT, PIECE, read_header
from dspark.checkpoint.tensors import TORCH_DTYPES, as_tensor
from dspark.errors import CheckpointError
from made_drafts import file_bytes

ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
DATA = bytes(range(8))


def refusal(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    return caught.value


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "weights.a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2, generator=generator).half(),
        "scalar": torch.tensor(4.0, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }


def test_a_file_of_the_library_is_read_bit_exactly(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors(), {"format": "pt"}))
    file = read_header(path)
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == set(tensors())
    for name, tensor in tensors().items():
        read = as_tensor(file.entries[name], file.read(name))
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert read.equal(tensor)


def test_a_tensor_larger_than_a_piece_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensor = torch.arange(PIECE // 4 + 1000, dtype=torch.float32)
    path.write_bytes(save({"a": tensor}))
    file = read_header(path)
    assert [len(p) for p in file.pieces("a")] == [PIECE, 4000]
    assert as_tensor(file.entries["a"], file.read("a")).equal(tensor)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {**ONE["a"], **changes}}


@pytest.mark.parametrize(
    ("content", "expected", "found"),
    [
        (b"", "at least 8 bytes", "0 bytes"),
        (b"\x01\x00\x00", "at least 8 bytes", "3 bytes"),
        (file_bytes(ONE, DATA, length=1 << 63), "within the file", "9223372036854775808"),
        (file_bytes(ONE, b"", length=10_000), "within the file", "10000"),
        (file_bytes(b"\xff\xfe{}"), "begins with '{'", "ff"),
        (file_bytes(b""), "begins with '{'", "b''"),
        (file_bytes(b"[]"), "begins with '{'", "["),
        (file_bytes(b'{"\xff": 1}'), "UTF-8", "0xff at 2"),
        (file_bytes(b'{"a": 1'), "JSON", "delimiter"),
        (file_bytes(b"{" + b'"a":{' * 50_000), "JSON", "recursion"),
        (file_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "JSON", "digits"),
        (file_bytes(b'{"a": NaN}'), "JSON", "NaN"),
        (file_bytes(b'{"a": 1, "a": 2}'), "each key once", "'a' twice"),
        (file_bytes(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "each key once", "'dtype' twice"),
        (file_bytes({"__metadata__": {"a": 1}}), "texts only", "1"),
        (file_bytes({"__metadata__": []}), "texts only", "[]"),
        (file_bytes({"a": 1}), "dtype, shape and data_offsets", "1"),
        (file_bytes({"a": {"dtype": "F32", "shape": [2]}}), "data_offsets of a", "shape"),
        (file_bytes(entry(more=1), DATA), "data_offsets of a", "more"),
        (file_bytes(entry(dtype="F33"), DATA), "a dtype", "F33"),
        (file_bytes(entry(dtype="F4"), DATA), "a dtype", "F4"),
        (file_bytes(entry(dtype=["F32"]), DATA), "a dtype", "F32"),
        (file_bytes(entry(shape=[-2]), DATA), "none negative", "-2"),
        (file_bytes(entry(shape=[True]), DATA), "none negative", "True"),
        (file_bytes(entry(shape=[2.0]), DATA), "none negative", "2.0"),
        (file_bytes(entry(shape=2), DATA), "none negative", "2"),
        (file_bytes(entry(shape=[1] * 17), DATA), "at most 16 sizes", "1"),
        (file_bytes(entry(shape=[1 << 62] * 16), DATA), "bytes for a", "0 to 8"),
        (file_bytes(entry(shape=[3]), DATA), "12 bytes for a", "8 bytes"),
        (file_bytes(entry(dtype="F16"), DATA), "4 bytes for a", "8 bytes"),
        (file_bytes(entry(data_offsets=[8, 0]), DATA), "8 bytes for a", "8 to 0"),
        (file_bytes(entry(data_offsets=[-8, 0]), DATA), "two data_offsets", "-8"),
        (file_bytes(entry(data_offsets=[0]), DATA), "two data_offsets", "[0]"),
        (file_bytes(entry(data_offsets=[4, 12]), DATA + DATA), "start at byte 0", "leaves a gap"),
        (file_bytes({**ONE, "b": ONE["a"]}, DATA), "start at byte 8", "overlaps"),
        (file_bytes(ONE, DATA[:-1]), "8 bytes of tensor data", "truncated"),
        (file_bytes(ONE, DATA + b"x"), "8 bytes of tensor data", "longer than its tensors"),
        (file_bytes({}, b"x"), "0 bytes of tensor data", "longer"),
    ],
)  # fmt: skip
def test_a_malformed_file_says_what_is_wrong(
    tmp_path: Path, content: bytes, expected: str, found: str
) -> None:
    error = refusal(tmp_path / "x.safetensors", content)
    assert expected in error.expected
    assert found in error.found


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, found in ((tmp_path, "something else"), (tmp_path / "pipe", "something else"),
                        (tmp_path / "none", "no such file")):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert caught.value.found == found


def test_a_file_that_shrinks_after_its_header_was_checked_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(ONE, DATA))
    file = read_header(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="the end of the file"):
        file.read("a")


def test_numbers_in_the_file_decide_no_allocation(tmp_path: Path) -> None:
    """A sparse file of 4 GB that claims a header of as much, and a shape of exabytes."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((HEADER_LIMIT + 1).to_bytes(8, "little"))
    os.truncate(path, 4 << 30)
    hostile = file_bytes(entry(shape=[1 << 40, 1 << 20]), DATA)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="a header of at most"):
        read_header(path)
    path.write_bytes(hostile)
    with pytest.raises(CheckpointError, match="bytes for a"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def agrees_with_the_library(path: Path, content: bytes) -> None:
    """Ours refuses, or both read the same."""
    path.write_bytes(content)
    try:
        file = read_header(path)
        ours = {
            n: as_tensor(e, file.read(n))
            for n, e in file.entries.items()
            if e.dtype in TORCH_DTYPES
        }
    except CheckpointError:
        return
    theirs = load(content)
    assert set(file.entries) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        same = (
            tensor.reshape(-1).view(torch.uint8).equal(theirs[name].reshape(-1).view(torch.uint8))
        )
        assert same


SOUND = save(tensors(), {"format": "pt"})
HEADER = 8 + int.from_bytes(SOUND[:8], "little")
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_in_the_header_never_give_a_wrong_tensor(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(SOUND)
    for at, value in flips:
        content[at] = value
    agrees_with_the_library(tmp_path / "x.safetensors", bytes(content))


@FUZZ
@given(st.integers(0, len(SOUND)))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    if length < len(SOUND):
        refusal(tmp_path / "x.safetensors", SOUND[:length])


NUMBER = st.integers(-2, 20) | st.integers() | st.booleans() | st.floats(allow_nan=False)
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BF16", "F16", "U8", "F8_E4M3", "I64", "F4", "x"]),
    "shape": st.lists(NUMBER, max_size=3),
    "data_offsets": st.lists(NUMBER, min_size=1, max_size=3),
})  # fmt: skip


@FUZZ
@given(st.dictionaries(st.text(max_size=3), ENTRY, max_size=3), st.binary(max_size=24))
@example({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b"")
@example({"": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"ab")
def test_any_header_is_read_as_the_library_does_or_refused(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(header).encode()
    agrees_with_the_library(tmp_path / "x.safetensors", file_bytes(text, data))
