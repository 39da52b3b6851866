"""One page of cached rows as bytes, for host memory, disk and the wire; see docs/formats.md.

A page holds the rows of the same ``page_size`` tokens in every layer, of target and draft alike,
because both lie under one block table: there is no second format for the draft and no second way to
move it. Which rows are sound is written per kind, so that a draft row which was never written does
not pass for one (a public engine read such rows after prefix hits: acceptance 3.41 fell to 1.02).

The states of a hybrid target are parts too, of one row each, so a state travels in the same format.

Three questions are asked of bytes before a number of them is used, each with an error of its own:
are they whole (length and checksum: :class:`DamagedPageError`), are they a page of this engine's
shape (magic, version, parts: :class:`ForeignPageError`), and are they the rows of these weights and
of this text (identity and key: :class:`StalePageError`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.errors import DamagedPageError, ForeignPageError, PageError, StalePageError
from dspark.model.fp8 import CODES, dequantize_rows, quantize_rows

MAGIC = b"DSPKPAGE"
VERSION = 1
HEADER = struct.Struct("<8sHHIIIQ16s16s16s")  # 80 bytes
PART = struct.Struct("<BBHIII")  # 16 bytes
ALIGN = 8

Kind = Literal["target", "draft", "matrix", "inputs"]
Form = Literal["float32", "bfloat16", "fp8"]
KINDS: dict[Kind, int] = {"target": 0, "draft": 1, "matrix": 2, "inputs": 3}
FORMS: dict[Form, int] = {"float32": 0, "bfloat16": 1, "fp8": 2}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PagePart(NamedTuple):
    """One tensor [rows, heads, width] of a page, stored as ``form``.

    ``rows`` is the page's size, or 1 for a state. ``layer`` counts within the kind.
    """

    kind: Kind
    form: Form
    layer: int
    rows: int
    heads: int
    width: int

    @property
    def byte_count(self) -> int:
        """Without padding; fp8 has one fp32 scale per row and head in front."""
        cells = self.rows * self.heads
        if self.form == "fp8":
            return cells * (4 + self.width)
        return cells * self.width * _DTYPES[self.form].itemsize

    def pack(self) -> bytes:
        return PART.pack(
            KINDS[self.kind], FORMS[self.form], self.layer, self.rows, self.heads, self.width
        )


class PageLayout(NamedTuple):
    """What a page of one engine consists of. Equal layouts exchange pages."""

    page_size: int
    parts: tuple[PagePart, ...]

    @property
    def map_bytes(self) -> int:
        """Of one validity map: a bit a row, lowest bit first."""
        return -(-self.page_size // 8)

    @property
    def head_bytes(self) -> int:
        """Everything in front of the first part."""
        return _padded(HEADER.size + PART.size * len(self.parts) + 2 * self.map_bytes)

    @property
    def byte_count(self) -> int:
        """Of a whole page."""
        return self.head_bytes + sum(_padded(part.byte_count) for part in self.parts)

    def bytes_per_token(self) -> float:
        """Of rows, the header's share included."""
        return self.byte_count / self.page_size


@dataclass(frozen=True)
class StoredPage:
    """``target_rows`` and ``draft_rows`` say for every row whether it is sound; rows that are not
    are zero. ``tensors`` [rows, heads, width] are in the order of the layout's parts; fp8 ones come
    back as float32."""

    target_rows: tuple[bool, ...]
    draft_rows: tuple[bool, ...]
    tensors: tuple[Tensor, ...]


def encode_page(layout: PageLayout, identity: bytes, key: bytes, page: StoredPage) -> bytes:
    """The bytes of ``page``; equal pages give equal bytes.

    Args:
        layout: must fit ``page``.
        identity: 16 bytes that name the weights of target and draft.
        key: 16 bytes that name the text up to the page's end.

    Raises:
        PageError: a number that is not finite; it would be served to everybody who shares the page.
    """
    assert len(identity) == len(key) == 16
    maps = [_map_to_bytes(rows) for rows in (page.target_rows, page.draft_rows)]
    assert len(page.target_rows) == len(page.draft_rows) == layout.page_size
    body = [_pad(b"".join([*(part.pack() for part in layout.parts), *maps]), HEADER.size)]
    for part, tensor in zip(layout.parts, page.tensors, strict=True):
        assert tensor.shape == (part.rows, part.heads, part.width), part
        body.append(_pad(_part_bytes(part, tensor, _valid(part, page))))
    after = b"".join(body)
    header = [MAGIC, VERSION, 0, layout.page_size, len(layout.parts), 0, len(after), identity, key]
    checksum = _checksum(HEADER.pack(*header, bytes(16)), after)
    return HEADER.pack(*header, checksum) + after


def decode_page(layout: PageLayout, identity: bytes, key: bytes, data: bytes) -> StoredPage:
    """Read what :func:`encode_page` wrote.

    Raises:
        ForeignPageError, DamagedPageError, StalePageError: see the module docstring.
    """
    if len(data) < HEADER.size:
        raise _damaged(f"at least {HEADER.size} bytes", f"{len(data)}")
    magic, version, flags, size, count, spare, after, whose, text, checksum = HEADER.unpack_from(
        data
    )
    if magic != MAGIC:
        raise _foreign(f"a file that begins with {MAGIC!r}", repr(magic))
    if version != VERSION:
        raise _foreign(f"version {VERSION}", f"version {version}")
    if len(data) != HEADER.size + after:
        raise _damaged(f"{HEADER.size + after} bytes", f"{len(data)}")
    blank = data[: HEADER.size - 16] + bytes(16)
    if _checksum(blank, data[HEADER.size :]) != checksum:
        raise _damaged("the checksum that its header names", "other bytes")
    if flags or spare or (size, count) != (layout.page_size, len(layout.parts)):
        raise _foreign(
            f"{layout.page_size} rows in {len(layout.parts)} parts",
            f"{size} rows in {count} parts, flags {flags:#x}",
        )
    table = data[HEADER.size : HEADER.size + PART.size * count]
    if table != b"".join(part.pack() for part in layout.parts) or len(data) != layout.byte_count:
        raise _foreign("parts of this engine's layers, shapes and number formats", "others")
    for name, found, wanted in (("weights", whose, identity), ("text", text, key)):
        if found != wanted:
            raise StalePageError(
                expected=f"rows of this {name} ({wanted.hex()})", found=found.hex(),
                where="stored page", fix="Nothing: its rows are computed again.",
            )  # fmt: skip
    return _content(layout, data)


def _content(layout: PageLayout, data: bytes) -> StoredPage:
    at, size = HEADER.size + PART.size * len(layout.parts), layout.map_bytes
    maps = [_map_of(data[at + i * size : at + (i + 1) * size], layout.page_size) for i in (0, 1)]
    position, tensors = layout.head_bytes, []
    for part in layout.parts:
        tensors.append(_part_tensor(part, data[position : position + part.byte_count]))
        position += _padded(part.byte_count)
    return StoredPage(maps[0], maps[1], tuple(tensors))


def _valid(part: PagePart, page: StoredPage) -> Sequence[bool]:
    if part.kind == "target":
        return page.target_rows
    return page.draft_rows if part.kind == "draft" else (True,)


def _part_bytes(part: PagePart, tensor: Tensor, valid: Sequence[bool]) -> bytes:
    rows = tensor.detach().cpu()
    sound = torch.tensor(list(valid)).view(-1, 1, 1)
    rows = torch.where(sound, rows, torch.zeros((), dtype=rows.dtype))
    if not bool(torch.isfinite(rows.float()).all()):
        raise PageError(
            expected="finite numbers", found="NaN or infinity",
            where=f"{part.kind} layer {part.layer} of a page to be stored",
            fix="The page is not stored; look for the layer that made it.",
        )  # fmt: skip
    if part.form == "fp8":
        codes, scale = quantize_rows(rows)
        return _raw(scale) + _raw(codes.view(torch.uint8))
    return _raw(rows.to(_DTYPES[part.form]))


def _part_tensor(part: PagePart, data: bytes) -> Tensor:
    shape = (part.rows, part.heads, part.width)
    if part.form != "fp8":
        return torch.frombuffer(bytearray(data), dtype=_DTYPES[part.form]).view(shape)
    split = 4 * part.rows * part.heads
    scale = torch.frombuffer(bytearray(data[:split]), dtype=torch.float32).view(*shape[:2], 1)
    codes = torch.frombuffer(bytearray(data[split:]), dtype=torch.uint8).view(CODES).view(shape)
    return dequantize_rows(codes, scale)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _map_to_bytes(rows: Sequence[bool]) -> bytes:
    return np.packbits(np.array(rows, dtype=bool), bitorder="little").tobytes()


def _map_of(data: bytes, rows: int) -> tuple[bool, ...]:
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")[:rows]
    return tuple(bool(bit) for bit in bits)


def _padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def _pad(data: bytes, before: int = 0) -> bytes:
    """``data`` with zeros up to the next multiple of ``ALIGN``, counted from ``before``."""
    return data + bytes(_padded(before + len(data)) - before - len(data))


def _checksum(header: bytes, after: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=16)
    digest.update(after)
    return digest.digest()


def _damaged(expected: str, found: str) -> DamagedPageError:
    return DamagedPageError(
        expected=expected, found=found, where="stored page",
        fix="Nothing: its rows are computed again. Often? Check the disk.",
    )  # fmt: skip


def _foreign(expected: str, found: str) -> ForeignPageError:
    return ForeignPageError(
        expected=expected, found=found, where="stored page",
        fix="Give engines of different models or versions different folders.",
    )  # fmt: skip
