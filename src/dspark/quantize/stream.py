"""The one pass over a source: read, hash, quantize, hash, hand on; a few MiB at a time.

Where the bytes go is the caller's: to a file when converting, to a comparison when checking.
Hashing and handing on have a thread of their own, which takes about as long as the arithmetic.
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

from dspark.artifacts.progress import OnDone
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
"""Pieces that may wait for the background; bounds the memory."""

Bytes = bytes | bytearray | memoryview


class Sink(Protocol):
    """Takes the bytes of every tensor that comes out, in pieces and in order.

    ``put`` is called in the background thread, ``block`` in the caller's.
    """

    def put(self, name: str, at: int, data: Bytes) -> None:
        """``data`` belongs to tensor ``name`` from its byte ``at`` on."""

    def block(self, name: str, weights: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Told of every quantized block before its codes are put."""


class Background:
    """One thread beside the arithmetic that hashes and hands on, everything in the given order."""

    def __init__(self, pool: ThreadPoolExecutor, sink: Sink) -> None:
        self._pool, self._sink = pool, sink
        self._waiting: deque[Future[None]] = deque()

    def update(self, digest: Any, data: Bytes) -> None:
        """Hash ``data``, which must not change afterwards."""
        self._submit(digest.update, data)

    def put(self, name: str, at: int, data: Bytes) -> None:
        """:meth:`Sink.put`; what it raises comes up in a later call here."""
        self._submit(self._sink.put, name, at, data)

    def hexdigest(self, digest: Any) -> str:
        """The sum, after everything before has been done."""
        self._wait(0)
        return str(digest.hexdigest())

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._wait(WAITING - 1)
        self._waiting.append(self._pool.submit(work, *arguments))

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()


@contextmanager
def background(sink: Sink) -> Iterator[Background]:
    """A :class:`Background` for the length of a ``with`` block; torch leaves it a core.

    With as many threads of torch as there are cores, the one more made two cores slower than one:
    torch's threads wait for each other by spinning.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            yield Background(pool, sink)
    finally:
        torch.set_num_threads(threads)


def pass_tensor(
    plan: Plan, name: str, sink: Sink, beside: Background, on_bytes: OnDone
) -> TensorRecord:
    """Send one tensor of the source through; returns its manifest record.

    ``on_bytes`` is told of the source's bytes as they are used up.

    Raises:
        QuantizationError: a weight that becomes FP8 holds NaN or infinity.
        CheckpointError: the source became unreadable.
    """
    if name in plan.fp8:
        return _quantize(plan, name, sink, beside, on_bytes)
    entry, digest, at = plan.weights.entries[name], hashlib.sha256(), 0
    for piece in plan.weights.pieces(name, COPY):
        beside.update(digest, piece)
        beside.put(name, at, piece)
        at += len(piece)
        on_bytes(len(piece))
    found = beside.hexdigest(digest)
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
    plan: Plan, name: str, sink: Sink, beside: Background, on_bytes: OnDone
) -> TensorRecord:
    entry = plan.weights.entries[name]
    rows, columns = entry.shape
    dtype = WEIGHT_DTYPES[entry.dtype]
    before, after, measured = hashlib.sha256(), hashlib.sha256(), Measured()
    scales: list[Tensor] = []
    at, size = 0, max(1, BLOCK // columns) * columns * dtype.itemsize
    for piece in plan.weights.pieces(name, size):
        beside.update(before, piece)
        weights = torch.frombuffer(piece, dtype=dtype).reshape(-1, columns)
        made = quantize_block(weights, measured)
        if made is None:
            _refuse_numbers(plan, name)
        codes, scale = made
        sink.block(name, weights, codes, scale)
        data = raw_bytes(codes)
        beside.update(after, data)
        beside.put(name, at, data)
        at += len(data)
        scales.append(scale)
        on_bytes(len(piece))
    scale = torch.cat(scales)
    beside.put(name + SCALE, 0, raw_bytes(scale))
    return TensorRecord(
        name=name,
        role="quantized",
        shape=entry.shape,
        source_dtype=entry.dtype,
        source_bytes=entry.bytes,
        source_sha256=beside.hexdigest(before),
        dtype=FP8,
        bytes=rows * columns,
        sha256=beside.hexdigest(after),
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
