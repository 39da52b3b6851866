"""The one pass over a source: read, hash, quantize, hash, hand on; a few MiB at a time.

Where the bytes go is the caller's: to a file when converting, to a comparison when checking. Hashes
are computed in a thread of their own, which takes as long as the arithmetic does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from dspark.checkpoint.quantization import FP8, SCALE
from dspark.checkpoint.tensors import WEIGHT_DTYPES, raw_bytes
from dspark.errors import QuantizationError
from dspark.quantize.manifest import ScaleRecord, TensorRecord
from dspark.quantize.plan import Plan
from dspark.quantize.rows import Measured, quantize_block

BLOCK = 1 << 19
"""Numbers quantized at once: a few MiB of fp32 stay in the cache between the steps."""
COPY = 1 << 20
"""Bytes of other tensors handed on at once."""
WAITING = 8
"""Pieces that may wait to be hashed; bounds the memory."""

Bytes = bytes | bytearray | memoryview


class Sink(Protocol):
    """Takes the bytes of every tensor that comes out, in pieces and in order."""

    def put(self, name: str, at: int, data: Bytes) -> None:
        """``data`` belongs to tensor ``name`` from its byte ``at`` on."""

    def block(self, name: str, weights: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Told of every quantized block before its codes are put."""


class Hasher:
    """sha256 sums in one background thread, each fed in order."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: deque[Future[None]] = deque()

    def update(self, digest: Any, data: Bytes) -> None:
        """``data`` must not change afterwards."""
        while len(self._waiting) >= WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(digest.update, data))

    def hexdigest(self, digest: Any) -> str:
        return self._pool.submit(lambda: str(digest.hexdigest())).result()


@contextmanager
def hasher() -> Iterator[Hasher]:
    """A :class:`Hasher` for the length of a ``with`` block."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield Hasher(pool)


def pass_tensor(
    plan: Plan, name: str, sink: Sink, hashes: Hasher, on_bytes: Callable[[int], None]
) -> TensorRecord:
    """Send one tensor of the source through; returns its manifest record.

    ``on_bytes`` is told of the source's bytes as they are used up.

    Raises:
        QuantizationError: a weight that becomes FP8 holds NaN or infinity.
        CheckpointError: the source became unreadable.
    """
    if name in plan.fp8:
        return _quantize(plan, name, sink, hashes, on_bytes)
    entry, digest, at = plan.weights.entries[name], hashlib.sha256(), 0
    for piece in plan.weights.pieces(name, COPY):
        hashes.update(digest, piece)
        sink.put(name, at, piece)
        at += len(piece)
        on_bytes(len(piece))
    found = hashes.hexdigest(digest)
    return TensorRecord(
        name=name,
        role="copied",
        shape=entry.shape,
        source_dtype=entry.dtype,
        source_bytes=entry.bytes,
        source_sha256=found,
        dtype=entry.dtype,
        bytes=entry.bytes,
        sha256=found,
    )


def _quantize(
    plan: Plan, name: str, sink: Sink, hashes: Hasher, on_bytes: Callable[[int], None]
) -> TensorRecord:
    entry = plan.weights.entries[name]
    rows, columns = entry.shape
    dtype = WEIGHT_DTYPES[entry.dtype]
    before, after, measured = hashlib.sha256(), hashlib.sha256(), Measured()
    scales: list[Tensor] = []
    at, size = 0, max(1, BLOCK // columns) * columns * dtype.itemsize
    for piece in plan.weights.pieces(name, size):
        hashes.update(before, piece)
        weights = torch.frombuffer(piece, dtype=dtype).reshape(-1, columns)
        made = quantize_block(weights, measured)
        if made is None:
            _refuse_numbers(plan, name)
        codes, scale = made
        sink.block(name, weights, codes, scale)
        data = raw_bytes(codes)
        hashes.update(after, data)
        sink.put(name, at, data)
        at += len(data)
        scales.append(scale)
        on_bytes(len(piece))
    scale = torch.cat(scales)
    sink.put(name + SCALE, 0, raw_bytes(scale))
    return TensorRecord(
        name=name,
        role="quantized",
        shape=entry.shape,
        source_dtype=entry.dtype,
        source_bytes=entry.bytes,
        source_sha256=hashes.hexdigest(before),
        dtype=FP8,
        bytes=rows * columns,
        sha256=hashes.hexdigest(after),
        scale=ScaleRecord(
            name=name + SCALE,
            shape=(rows, 1),
            bytes=4 * rows,
            sha256=hashlib.sha256(raw_bytes(scale)).hexdigest(),
        ),
        zero_rows=measured.zero_rows,
        clamped=measured.clamped,
        max_relative_error=measured.worst,
        sqnr_db=measured.sqnr_db(),
    )


def _refuse_numbers(plan: Plan, name: str) -> NoReturn:
    raise QuantizationError(
        expected="finite weights",
        found=f"{name} holds NaN or infinity",
        where=plan.weights.where,
        fix="Training went wrong or the file is damaged: `dspark inspect --deep` reads all of it.",
    )
