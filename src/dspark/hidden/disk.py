"""Hidden records at rest: one safetensors file per record, written atomically.

Cheap to resume (a record is there or it is not), cheap to read (memory-mapped), and a damaged file
names itself. ``ack`` and ``abort`` are no-ops: on disk the folder owns its records.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.artifacts import atomic_write
from dspark.artifacts.storage import PARTIAL
from dspark.errors import DamagedArtifactError, DataError
from dspark.hidden.record import HiddenRecord, layer_hash

SUFFIX = ".safetensors"
_TENSORS = ("ids", "loss_mask", "taps", "final", "greedy", "log_z")


def tensors_crc(tensors: dict[str, Tensor]) -> int:
    """CRC-32 over the tensors' bytes, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        flat = tensors[name].contiguous().reshape(-1)
        crc = zlib.crc32(flat.view(dtype=torch.uint8).numpy().data, crc)
    return crc


def description(record: HiddenRecord) -> dict[str, Any]:
    """What a record says of itself besides its tensors, as JSON can hold it."""
    return {
        "id": record.id,
        "category": record.category,
        "temperature": record.temperature,
        "layer_ids": list(record.layer_ids),
        "norm_state": record.norm_state,
        "stream": record.stream,
        "engine": record.engine,
    }


class DiskStore:
    """Records below ``folder``; implements :class:`dspark.hidden.record.HiddenStore`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, record_id: str) -> Path:
        if not record_id or record_id.startswith(".") or {"/", "\0"} & set(record_id):
            raise DataError(
                expected="a record id usable as a file name",
                found=repr(record_id),
                where=str(self.folder),
                fix="Use ids of letters, digits, dashes and dots.",
            )
        return self.folder / (record_id + SUFFIX)

    def put(self, record: HiddenRecord) -> None:
        """Write one record; a reader sees all of it or nothing."""
        tensors = {name: getattr(record.check(), name).contiguous() for name in _TENSORS}
        meta = description(record)
        meta |= {
            "layer_hash": layer_hash(record.layer_ids, record.stream),
            "crc32": tensors_crc(tensors),
        }
        atomic_write(self._path(record.id), save(tensors, {"record": json.dumps(meta)}))

    def get(self, record_id: str) -> HiddenRecord:
        """Read and check one record.

        Raises:
            DamagedArtifactError: absent, truncated or inconsistent.
        """
        path = self._path(record_id)
        try:
            with safe_open(str(path), framework="pt") as file:
                meta = json.loads((file.metadata() or {})["record"])
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
            meta["layer_ids"] = tuple(meta["layer_ids"])
            if meta["id"] != record_id:
                raise ValueError(f"the record of {meta['id']!r}")
            # Records of earlier versions have neither.
            found = meta.pop("layer_hash", None)
            if found is not None and found != layer_hash(meta["layer_ids"], meta["stream"]):
                raise ValueError("layer ids that do not match their hash")
            crc = meta.pop("crc32", None)
            if crc is not None and crc != tensors_crc(tensors):
                raise ValueError("a checksum does not match")
            record = HiddenRecord(**meta, **tensors)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise DamagedArtifactError(
                expected="a readable hidden record",
                found=f"{type(error).__name__}: {error}",
                where=str(path),
                fix="Delete this file and run capture again: only missing records are redone.",
            ) from error
        return record.check()

    def ids(self) -> list[str]:
        """Ids of complete records, sorted."""
        return sorted(p.name[: -len(SUFFIX)] for p in self.folder.glob("[!.]*" + SUFFIX))

    def ack(self, record_id: str) -> None:
        """Nothing to release on disk."""

    def abort(self, record_id: str) -> None:
        """Nothing to give back on disk."""

    def gc(self) -> int:
        """Remove temporary files a killed writer left; return how many."""
        removed = 0
        for path in self.folder.glob(PARTIAL):
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed += 1
        return removed

    def health(self) -> dict[str, int]:
        """Number of records and bytes."""
        sizes = [p.stat().st_size for p in self.folder.glob("[!.]*" + SUFFIX)]
        return {"records": len(sizes), "bytes": sum(sizes)}
