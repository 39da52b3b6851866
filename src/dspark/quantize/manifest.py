"""``atom_dspark_ptq_manifest.json``: what was quantized, how, and the hash of every byte of it.

The file proves a checkpoint to somebody who has its source: everything in it but the versions can
be computed again, and :mod:`dspark.quantize.check` does. Its own last field is the hash of all that
stands before, so that no bit of the file itself can change unseen either. There are no times, paths
or machines in it: the same source and recipe give the same bytes (docs/contract.md, section 8).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from dspark.config.architecture import Frozen
from dspark.config.load import read_json_object
from dspark.errors import ConfigError, DamagedArtifactError

MANIFEST = "atom_dspark_ptq_manifest.json"
SCHEMA: Literal[1] = 1
Sha256 = str


class ScaleRecord(Frozen):
    """The scales of one weight: fp32, one a row."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["F32"] = "F32"
    bytes: int
    sha256: Sha256


class TensorRecord(Frozen):
    """One tensor, before and after. ``source_...`` is before; a copied one is the same twice."""

    name: str
    role: Literal["quantized", "copied"]
    shape: tuple[int, ...]
    source_dtype: str
    source_bytes: int
    source_sha256: Sha256
    dtype: str
    bytes: int
    sha256: Sha256
    scale: ScaleRecord | None = None
    zero_rows: int | None = None
    clamped: int | None = None
    max_relative_error: float | None = None
    sqnr_db: float | None = None


class FileRecord(Frozen):
    """A weight file: its size, and the hash of the header alone (tensors have their own)."""

    bytes: int
    header_sha256: Sha256


class Side(Frozen):
    """All files of a checkpoint; ``index_sha256`` when it has several files of weights."""

    config_sha256: Sha256
    index_sha256: Sha256 | None
    files: dict[str, FileRecord]


class RecipeRecord(Frozen):
    """What was asked for."""

    name: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class Totals(Frozen):
    """Counts and bytes of tensor data, headers left out."""

    tensors: int
    quantized_tensors: int
    quantized_modules: int
    copied_tensors: int
    source_bytes: int
    bytes: int
    quantized_source_bytes: int
    code_bytes: int
    scale_bytes: int
    zero_rows: int
    clamped: int


class PtqManifest(Frozen):
    """The whole file; field order is that of the file."""

    format: Literal["atom_dspark_ptq_manifest"] = "atom_dspark_ptq_manifest"
    schema_version: Literal[1] = SCHEMA
    versions: dict[str, str]
    recipe: RecipeRecord
    scheme: dict[str, Any]
    source: Side
    output: Side
    totals: Totals
    modules: dict[str, list[str]]
    exclusions: dict[str, str]
    tensors: tuple[TensorRecord, ...]
    sha256: Sha256 = Field(default="")


def seal(manifest: PtqManifest) -> PtqManifest:
    """The same with ``sha256``: of the text of everything before it."""
    fields = manifest.model_dump(mode="json", exclude={"sha256"})
    return manifest.model_copy(
        update={"sha256": hashlib.sha256(_text(fields).encode()).hexdigest()}
    )


def text_of(manifest: PtqManifest) -> str:
    """The file's text."""
    return _text(manifest.model_dump(mode="json"))


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_ptq_manifest(folder: Path) -> PtqManifest:
    """The manifest of ``folder``, every byte as it was written.

    Raises:
        DamagedArtifactError: absent, unreadable, or changed since.
    """
    path = folder / MANIFEST
    try:
        raw = read_json_object(path, "the manifest of a quantized draft")
        manifest = PtqManifest.model_validate(raw)
        same = path.read_bytes() == text_of(seal(manifest)).encode()
    except ConfigError as error:
        raise damaged(path, error.expected, error.found) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(path, f"a sound {place}", str(first["msg"])[:200]) from error
    if not same:
        raise damaged(path, "the text that its own sha256 seals", "another text")
    return manifest


def damaged(where: Path | str, expected: str, found: str) -> DamagedArtifactError:
    """The error of everything that is not as the manifest or the source says."""
    return DamagedArtifactError(
        expected=expected,
        found=found,
        where=str(where),
        fix="Copy the folder again, or quantize the source again.",
    )
