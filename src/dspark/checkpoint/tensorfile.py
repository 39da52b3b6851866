"""The safetensors format, read by ourselves and trusted in nothing.

A file is eight bytes (little-endian length of the header), the header (one JSON object: tensor name
-> ``dtype``, ``shape``, ``data_offsets``; ``__metadata__`` -> texts), then the bytes of all tensors
without a gap. Weights come from strangers, so everything is checked before a byte of tensor data is
read: lengths against the size of the file, duplicate keys, offsets that overlap, leave gaps or
leave the file, byte counts against shapes. No number in the file decides how much is allocated.

Reading in pieces (:meth:`TensorFile.pieces`) keeps a checkpoint of any size within a few dozen MiB.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dspark.config.strictjson import strict_json
from dspark.errors import CheckpointError

HEADER_LIMIT = 16 << 20
"""Largest header read, in bytes: a draft's has about 8 kB, one of 100,000 tensors 12 MB."""
RANK_LIMIT = 16
"""Most dimensions of a tensor: a shape of a million numbers would take minutes to multiply."""
PIECE = 16 << 20
"""Bytes read at once; a multiple of every item size."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""dtype -> bytes of one number, in the order of the library's own list."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: ``dtype`` as the format spells it, its bytes within the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class TensorFile:
    """A checked header. ``data_start`` is where the first tensor's bytes lie in the file."""

    path: Path
    data_start: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]

    def pieces(self, name: str, size: int = PIECE) -> Iterator[bytearray]:
        """A tensor's bytes, ``size`` at a time, each buffer fresh and writable.

        Raises:
            CheckpointError: the file became shorter or unreadable since its header was checked.
        """
        entry = self.entries[name]
        try:
            with open(self.path, "rb") as file:
                file.seek(self.data_start + entry.start)
                left = entry.bytes
                while left:
                    piece = bytearray(min(size, left))
                    if file.readinto(piece) != len(piece):
                        _refuse(self.path, f"all bytes of {name}", "the end of the file")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            _refuse(self.path, "a readable file", error.strerror or str(error))

    def read(self, name: str) -> bytearray:
        """All bytes of a tensor. Raises as :meth:`pieces`."""
        whole = bytearray(self.entries[name].bytes)
        at = 0
        for piece in self.pieces(name):
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole


def read_header(path: Path) -> TensorFile:
    """Read and check the header of a safetensors file; tensor data is not touched.

    Raises:
        CheckpointError: absent, not a plain file, or malformed in any way; says in which.
    """
    try:
        # Opening a pipe would wait for ever, so the kind is known before.
        if not stat.S_ISREG(os.stat(path).st_mode):
            _refuse(path, "a plain file", "something else")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _header_bytes(path, file, size)
    except FileNotFoundError:
        _refuse(path, "a file of weights", "no such file", "Check the path and the folder.")
    except OSError as error:
        _refuse(path, "a readable file", error.strerror or str(error))
    header = _parse(path, raw)
    metadata = _metadata(path, header.pop("__metadata__", {}))
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    _check_layout(path, entries, size - 8 - len(raw))
    return TensorFile(path, 8 + len(raw), entries, metadata)


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    if size < 8:
        _refuse(path, "at least 8 bytes", f"a file of {size} bytes")
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        _refuse(path, f"a header within the file of {size} bytes", f"a header of {length} bytes")
    if length > HEADER_LIMIT:
        _refuse(path, f"a header of at most {HEADER_LIMIT} bytes", f"one of {length} bytes")
    raw = file.read(length)
    if len(raw) != length:
        _refuse(path, f"a header of {length} bytes", f"only {len(raw)} bytes")
    return raw


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        _refuse(path, "a header that begins with '{'", repr(raw[:1]))
    try:
        header = strict_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        _refuse(path, "a header in UTF-8", f"byte 0x{raw[error.start]:02x} at {error.start}")
    except (ValueError, RecursionError) as error:
        _refuse(path, "a header of JSON with each key once", str(error)[:200])
    return dict(header)


def _metadata(path: Path, found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        _refuse(path, "__metadata__ of texts only", repr(found)[:80])
    return dict(found)


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        found = sorted(value) if isinstance(value, dict) else value
        _refuse(path, f"dtype, shape and data_offsets of {name}", repr(found)[:80])
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(path, f"a dtype of {name} among {', '.join(ITEM_BYTES)}", repr(dtype)[:80])
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_is_size, shape)):
        expected = f"a shape of {name}: at most {RANK_LIMIT} sizes, none negative"
        _refuse(path, expected, repr(shape)[:80])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _refuse(path, f"two data_offsets of {name}", repr(offsets)[:80])
    start, end = offsets
    need = math.prod(shape) * ITEM_BYTES[dtype]
    if end - start != need:
        size = str(need) if need < 1 << 63 else "more than 2^63"
        _refuse(
            path,
            f"{size} bytes for {name}, {dtype} {shape}"[:200],
            f"data_offsets {start} to {end}, {end - start} bytes",
        )
    return TensorEntry(name, dtype, tuple(shape), start, end)


def _is_size(value: Any) -> bool:
    # A bool is an int to Python and no size to anyone; 2^63 is what other readers can hold.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_layout(path: Path, entries: dict[str, TensorEntry], data: int) -> None:
    """Tensors follow each other without overlap or gap and end where the file ends."""
    at = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != at:
            kind = "overlaps the one before" if entry.start < at else "leaves a gap before it"
            _refuse(path, f"{entry.name} to start at byte {at}", f"{entry.start}: it {kind}")
        at = entry.end
    if at != data:
        kind = "truncated" if at > data else "longer than its tensors"
        _refuse(path, f"{at} bytes of tensor data", f"{data}: the file is {kind}")


def _refuse(path: Path, expected: str, found: str, fix: str = "") -> NoReturn:
    raise CheckpointError(
        expected=expected,
        found=found,
        where=str(path),
        fix=fix or "Copy or download the file again; if that does not help, it was made wrongly.",
    )
