"""Writing safetensors without holding the tensors: header first, then one piece after another.

The header is known from names, dtypes and shapes alone, so a checkpoint of any size is written with
a few dozen MiB of memory, whatever makes the numbers (a random stream, another file, a module).
Files are byte for byte those of the safetensors library: tensors by falling dtype (the
library's list of them), then by name, the header padded with spaces to eight bytes.

With a size limit the tensors are spread over several files in that same order, with an index.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dspark.artifacts import atomic_file, atomic_json
from dspark.checkpoint.shards import INDEX, WEIGHTS
from dspark.checkpoint.tensorfile import ITEM_BYTES, PIECE
from dspark.checkpoint.tensors import FORMAT_NAMES, raw_bytes
from dspark.errors import StorageError

Bytes = bytes | bytearray | memoryview
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written; ``dtype`` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Pieces = Callable[[TensorSpec], Iterable[Bytes]]
"""Gives a tensor's bytes in order."""


@dataclass(frozen=True)
class Written:
    """What was written: size and hash of every file, and of the tensors asked for."""

    files: dict[str, dict[str, Any]]
    digests: dict[str, str]


def write_weights(
    folder: Path,
    specs: Sequence[TensorSpec],
    pieces: Pieces,
    *,
    max_shard_bytes: int | None = None,
    hashed: frozenset[str] = frozenset(),
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write ``model.safetensors``, or shards of at most ``max_shard_bytes`` with their index.

    Args:
        folder: must exist.
        specs: every tensor once, in any order.
        pieces: called once for each, in the order of the file.
        max_shard_bytes: of tensor data; a tensor above it has a file of its own.
        hashed: names whose own sha256 is wanted.
        on_bytes: told how many bytes have been written since the last call.

    Raises:
        StorageError: disk full or not writable.
        ValueError: ``pieces`` gave another number of bytes than the spec says (a fault of ours).
    """
    groups = _shards(sorted(specs, key=file_order), max_shard_bytes)
    names = [WEIGHTS]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files: dict[str, dict[str, Any]] = {}
    digests: dict[str, str] = {}
    mapped: dict[str, str] = {}
    for name, group in zip(names, groups, strict=True):
        with atomic_file(folder / name) as file:
            sink = _Sink(file, on_bytes)
            sink.write(header_bytes(group))
            for spec in group:
                digests |= _write_tensor(sink, spec, pieces, wanted=spec.name in hashed)
        files[name] = {"bytes": sink.count, "sha256": sink.digest.hexdigest()}
        mapped |= {spec.name: name for spec in group}
    if len(groups) > 1:
        atomic_json(folder / INDEX, index_of(specs, mapped))
    return Written(files, digests)


def require_room(folder: Path, need: int) -> None:
    """Refuse before the first byte what would not fit; ``need`` is in bytes.

    Raises:
        StorageError: less room on the disk that ``folder`` is (or will be) on.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise StorageError(
            expected=f"{need / 1e9:.2f} GB of free disk",
            found=f"{free / 1e9:.2f} GB",
            where=str(folder),
            fix="Free some space, or name a folder on another disk.",
        )


def tensor_pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of ``tensor`` in ``dtype``, cast a piece at a time."""
    flat = tensor.detach().reshape(-1)
    step = PIECE // dtype.itemsize
    for at in range(0, len(flat), step):
        yield raw_bytes(flat[at : at + step].to("cpu", dtype).contiguous())


def specs_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> list[TensorSpec]:
    """All tensors in one dtype."""
    return [TensorSpec(name, FORMAT_NAMES[dtype], shape) for name, shape in shapes.items()]


class _Sink:
    """A file that counts and hashes what goes into it."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self.file = file
        self.on_bytes = on_bytes
        self.count = 0
        self.digest = hashlib.sha256()

    def write(self, data: Bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.count += len(data)
        self.on_bytes(len(data))


def _write_tensor(sink: _Sink, spec: TensorSpec, pieces: Pieces, *, wanted: bool) -> dict[str, str]:
    before, digest = sink.count, hashlib.sha256()
    for piece in pieces(spec):
        sink.write(piece)
        if wanted:
            digest.update(piece)
    if sink.count - before != spec.bytes:
        raise ValueError(f"{spec.name}: {sink.count - before} bytes written, not {spec.bytes}")
    return {spec.name: digest.hexdigest()} if wanted else {}


def index_of(specs: Iterable[TensorSpec], mapped: dict[str, str]) -> dict[str, Any]:
    """What the index of several files says; ``mapped``: tensor name -> file name."""
    specs = list(specs)
    totals = {
        "total_parameters": sum(math.prod(spec.shape) for spec in specs),
        "total_size": sum(spec.bytes for spec in specs),
    }
    return {"metadata": totals, "weight_map": dict(sorted(mapped.items()))}


def file_order(spec: TensorSpec) -> tuple[int, str]:
    """Sort key of the tensors of a file: by falling dtype, then by name."""
    return -list(ITEM_BYTES).index(spec.dtype), spec.name


def header_bytes(group: Sequence[TensorSpec]) -> bytes:
    """Length and header of a file that holds ``group`` in that order."""
    header: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for spec in group:
        end = at + spec.bytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(specs: Sequence[TensorSpec], limit: int | None) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if limit is not None and groups[-1] and size + spec.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.bytes
    return groups
