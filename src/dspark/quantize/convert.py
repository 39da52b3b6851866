"""From a float checkpoint to an FP8 one: streamed, resumable, and there as a whole or not at all.

Work goes on in a hidden folder beside the result, which is renamed when everything is on the disk.
A journal there has one line for each finished tensor: its manifest record. After an interruption
the same command reads it, believes only records whose bytes have the recorded hash, and goes on
with the rest. A source that changed meanwhile, or another recipe, starts anew; a source that cannot
be quantized leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import ValidationError
from torch import Tensor

from dspark import __version__
from dspark.artifacts import atomic_write, storage_guard
from dspark.artifacts.progress import OnDone, untold
from dspark.artifacts.storage import require_free, sync
from dspark.checkpoint.quantization import GROUP, SCALE
from dspark.checkpoint.writer import require_room
from dspark.errors import CheckpointError, StorageError
from dspark.quantize.manifest import (
    MANIFEST,
    SCHEMA,
    PtqManifest,
    TensorRecord,
    Totals,
    seal,
    text_of,
)
from dspark.quantize.plan import Plan, out_side, source_side
from dspark.quantize.stream import Bytes, background, pass_tensor

JOURNAL = "journal.jsonl"
PIECE = 8 << 20
"""Bytes hashed at once when an earlier run is taken up."""
WRITE = 256 << 10
"""Bytes written at once."""


def work_folder(out: Path) -> Path:
    """Where the unfinished ``out`` lies."""
    return out.with_name(f".{out.name}.quantizing")


def quantize(plan: Plan, out: Path, on_bytes: OnDone = untold) -> PtqManifest:
    """Write the FP8 checkpoint of ``plan`` into the new folder ``out``.

    Args:
        plan: from :func:`~dspark.quantize.plan.make_plan`.
        out: must not exist, or be empty.
        on_bytes: told of the source's bytes as they are used up.

    Raises:
        QuantizationError: a weight is not finite; nothing is left behind.
        StorageError: no room, or not writable; what was complete is kept for the next run.
        ForeignArtifactError: ``out`` holds something.
    """
    require_free(out)
    work = work_folder(out.absolute())
    done_bytes = sum(path.stat().st_blocks * 512 for path in work.glob("*.safetensors"))
    require_room(out, plan.out_bytes - done_bytes)
    with storage_guard(out):
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work) as journal:
            try:
                records = _records(plan, work, journal, on_bytes)
            except CheckpointError:
                shutil.rmtree(work)
                raise
            manifest = seal(manifest_of(plan, records))
            for name, content in plan.small_files.items():
                atomic_write(work / name, content)
            atomic_write(work / MANIFEST, text_of(manifest))
            (work / JOURNAL).unlink()
            sync(work)
            os.replace(work, out)
            sync(out.absolute().parent)
    return manifest


@contextmanager
def _locked(work: Path) -> Iterator[BinaryIO]:
    """The journal, open to read and append, and nobody else's."""
    with open(work / JOURNAL, "a+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                expected="a result that nobody else is writing",
                found="another `dspark quantize` at work on it",
                where=str(work),
                fix="Wait for it, or name another folder.",
            ) from None
        yield journal


def _records(plan: Plan, work: Path, journal: BinaryIO, on_bytes: OnDone) -> list[TensorRecord]:
    """All tensors written and on the disk; one record each, in the plan's order."""
    done = _resumed(plan, work, journal, on_bytes)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(work / name, "r+b", buffering=0)) for name in plan.files
        }
        sink = _FileSink(plan, files)
        beside = stack.enter_context(background(sink))
        for name in plan.order:
            if name not in done:
                done[name] = pass_tensor(plan, name, sink, beside, on_bytes)
                journal.write(f"{done[name].model_dump_json()}\n".encode())
                journal.flush()
        for file in files.values():
            os.fsync(file.fileno())
    return [done[name] for name in plan.order]


@dataclass(frozen=True)
class _FileSink:
    """Writes every tensor to its place; the file exists and has its header."""

    plan: Plan
    files: dict[str, FileIO]

    def put(self, name: str, at: int, data: Bytes) -> None:
        home = self.plan.home[name]
        place, left = self.plan.files[home].offsets[name] + at, memoryview(data)
        while left:
            # Small pieces: for large ones some file systems look for large free pages in vain.
            count = os.pwrite(self.files[home].fileno(), left[:WRITE], place)
            place, left = place + count, left[count:]

    def block(self, name: str, weights: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Nothing: the bytes are all that is wanted."""


def _resumed(
    plan: Plan, work: Path, journal: BinaryIO, on_bytes: OnDone
) -> dict[str, TensorRecord]:
    """Records of an earlier run whose bytes are really there; prepares the files otherwise."""
    journal.seek(0)
    lines = journal.read().splitlines()
    print_now = _fingerprint(plan)
    if not lines or lines[0] != print_now:
        for leftover in work.iterdir():
            if leftover.name != JOURNAL:
                leftover.unlink()
        journal.truncate(0)
        journal.write(print_now + b"\n")
        journal.flush()
        for name, out in plan.files.items():
            with open(work / name, "wb") as file:
                file.write(out.header)
                file.truncate(out.size)
        return {}
    done: dict[str, TensorRecord] = {}
    for line in lines[1:]:
        try:
            record = TensorRecord.model_validate_json(line)
        except ValidationError:
            break  # the line that was being written
        if _is_there(plan, work, record):
            done[record.name] = record
            on_bytes(record.source_bytes, kept=True)
    journal.truncate(0)
    kept = [print_now, *(record.model_dump_json().encode() for record in done.values())]
    journal.write(b"".join(line + b"\n" for line in kept))
    journal.flush()
    return done


def _is_there(plan: Plan, work: Path, record: TensorRecord) -> bool:
    hashes = {record.name: record.sha256}
    if record.scale is not None:
        hashes[record.scale.name] = record.scale.sha256
    return all(_hash_of(plan, work, name) == known for name, known in hashes.items())


def _hash_of(plan: Plan, work: Path, name: str) -> str:
    out = plan.files[plan.home[name]]
    left = next(spec.bytes for spec in out.specs if spec.name == name)
    digest = hashlib.sha256()
    with open(work / plan.home[name], "rb") as file:
        file.seek(out.offsets[name])
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                return ""
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _fingerprint(plan: Plan) -> bytes:
    """Changes with the source, the recipe and the program."""
    stats = {f.path.name: f.path.stat() for f in plan.weights.files}
    said = {
        "version": [__version__, SCHEMA],
        "source": source_side(plan).model_dump(mode="json"),
        "times": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
        "out": out_side(plan).model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest().encode()


def manifest_of(plan: Plan, records: list[TensorRecord]) -> PtqManifest:
    """The manifest of these records, unsealed."""
    quantized = [r for r in records if r.role == "quantized"]
    scale_bytes = sum(r.scale.bytes for r in quantized if r.scale is not None)
    return PtqManifest(
        versions={"dspark": __version__, "torch": torch.__version__},
        recipe=plan.recipe,
        scheme={
            "weights": {**GROUP["weights"], "dtype": "float8_e4m3fn", "scale_dtype": "float32"},
            "input_activations": GROUP["input_activations"],
            "scale": "amax of the row / 448, 1 for a row of zeros",
            "code": "e4m3fn(clamp(weight / scale, -448, 448)), nearest even, never 0x80",
            "names": f"X.weight has X.weight{SCALE}",
        },
        source=source_side(plan),
        output=out_side(plan),
        totals=Totals(
            tensors=len(records) + len(quantized),
            quantized_tensors=len(quantized),
            quantized_modules=len(plan.choice.modules),
            copied_tensors=len(records) - len(quantized),
            source_bytes=sum(r.source_bytes for r in records),
            bytes=sum(r.bytes for r in records) + scale_bytes,
            quantized_source_bytes=sum(r.source_bytes for r in quantized),
            code_bytes=sum(r.bytes for r in quantized),
            scale_bytes=scale_bytes,
            zero_rows=sum(r.zero_rows or 0 for r in quantized),
            clamped=sum(r.clamped or 0 for r in quantized),
        ),
        modules={name: list(own) for name, own in plan.choice.modules.items()},
        exclusions=plan.choice.exclusions,
        tensors=tuple(records),
    )
