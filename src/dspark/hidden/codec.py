"""A hidden record as bytes on a wire: one header, then one part per tensor.

The header is JSON: what the record says of itself, the layers' hash, of every tensor its name,
dtype, shape and CRC-32. The parts are the tensors' own memory, so nothing is copied to send them.

Two things make a record smaller without changing what training computes:

- the last hidden state is the target's distribution, and only positions whose next token is
  supervised are ever asked for it: only those rows travel, the others come out as zeros;
- ``fp8`` sends taps as e4m3 with one scale per token and layer. This does change them (2 % of their
  norm on the quickstart's states), and is therefore an option.
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.errors import DamagedArtifactError
from dspark.hidden.disk import description
from dspark.hidden.record import HiddenRecord, layer_hash

Part = bytes | memoryview
TapsCoding = Literal["stored", "fp8"]
VERSION = 1
HEADER_BYTES = 2048  # upper bound, for bounds on memory
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn)
}
_FP8_MAX = 448.0


def cut(body: bytearray | mmap.mmap, sizes: Sequence[int], align: int = 1) -> list[Part]:
    """Views of the parts that lie one behind the other in ``body``, each at a multiple of
    ``align`` bytes. Nothing is copied."""
    view, at = memoryview(body), 0
    found: list[Part] = []
    for size in sizes:
        found.append(view[at : at + size])
        at += size + (-size % align)
    return found


def supervised_rows(loss_mask: Tensor) -> Tensor:
    """Positions [N] whose next token is supervised: the only ones a final state is needed of."""
    return loss_mask[1:].bool().nonzero().squeeze(-1)


def record_bytes(
    length: int, answer: int, layers: int, hidden: int, width: int, taps: TapsCoding = "stored"
) -> int:
    """Upper bound of an encoded record's bytes: ``length`` tokens, ``answer`` of them supervised.

    ``width`` is bytes per element of taps and final state. 13 bytes a token are id, mask, greedy
    token and log_z.
    """
    tap = layers * (hidden + 4) if taps == "fp8" else layers * hidden * width
    return HEADER_BYTES + length * (tap + 13) + answer * hidden * width


def encode(record: HiddenRecord, taps: TapsCoding = "stored") -> list[Part]:
    """[header, tensor, ...] of a checked record. The parts share the record's memory.

    Raises:
        DamagedArtifactError: the record is not sound.
    """
    record.check()
    tensors = {
        "ids": record.ids,
        "loss_mask": record.loss_mask,
        "greedy": record.greedy,
        "log_z": record.log_z,
        "final": record.final[supervised_rows(record.loss_mask)],
    }
    if taps == "fp8":
        tensors["taps_fp8"], tensors["taps_scale"] = _to_fp8(record.taps)
    else:
        tensors["taps"] = record.taps
    parts: list[Part] = []
    table = []
    for name, tensor in tensors.items():
        body = _bytes_of(tensor)
        table.append([name, _name(tensor.dtype), list(tensor.shape), zlib.crc32(body)])
        parts.append(body)
    header = {
        "version": VERSION,
        "record": description(record),
        "layer_hash": layer_hash(record.layer_ids, record.stream),
        "dtype": _name(record.taps.dtype),
        "tensors": table,
    }
    return [json.dumps(header).encode(), *parts]


def decode(parts: Sequence[Part], where: str) -> HiddenRecord:
    """The record of :func:`encode`; its tensors share the memory of ``parts`` if that is writable.

    Raises:
        DamagedArtifactError: a part is absent, cut or changed, or the record is not sound.
    """
    try:
        header = json.loads(bytes(parts[0]))
        if header["version"] != VERSION:
            raise ValueError(f"wire version {header['version']}, this is {VERSION}")
        tensors = _tensors(header["tensors"], parts[1:])
        record = _record(header, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise DamagedArtifactError(
            expected="a whole hidden record",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            where=where,
            fix="Teacher and trainer must run the same version of dspark.",
        ) from error
    return record.check()


def _record(header: dict[str, Any], tensors: dict[str, Any]) -> HiddenRecord:
    meta = dict(header["record"])
    meta["layer_ids"] = tuple(int(i) for i in meta["layer_ids"])
    if header["layer_hash"] != layer_hash(meta["layer_ids"], meta["stream"]):
        raise ValueError("layer ids that do not match their hash")
    dtype = _DTYPES[header["dtype"]]
    taps = tensors.pop("taps", None)
    if taps is None:
        scale = tensors.pop("taps_scale")
        taps = (tensors.pop("taps_fp8").float() * scale.unsqueeze(-1)).to(dtype)
    sent = tensors.pop("final")
    rows = supervised_rows(tensors["loss_mask"])
    final = sent.new_zeros(len(tensors["loss_mask"]), sent.shape[-1])
    final[rows] = sent
    return HiddenRecord(**meta, **tensors, taps=taps, final=final)


def _tensors(table: list[list[Any]], parts: Sequence[Part]) -> dict[str, Tensor]:
    if len(table) != len(parts):
        raise ValueError(f"{len(parts)} parts for {len(table)} tensors")
    found: dict[str, Tensor] = {}
    for (name, dtype_name, shape, crc), part in zip(table, parts, strict=True):
        dtype = _DTYPES[dtype_name]
        view = memoryview(part)
        if view.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of {view.nbytes} bytes for shape {shape}")
        if zlib.crc32(view) != crc:
            raise ValueError(f"{name}: a checksum does not match")
        if view.nbytes == 0:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        buffer = bytearray(view) if view.readonly else view
        found[name] = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_fp8(taps: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [S, L, H] and scales [S, L]: amax to 448, as for weights (contract, section 8)."""
    values = taps.float()
    amax = values.abs().amax(-1)
    scale = torch.where(amax > 0, amax / _FP8_MAX, 1.0)
    codes = (values / scale.unsqueeze(-1)).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scale
