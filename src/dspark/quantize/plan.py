"""Everything about a conversion that is known before a tensor is read.

Config, headers and recipe decide which tensors come out, where each of their bytes lies, and what
config.json says. Writing and checking both start here, so a check computes the same layout from the
source and compares, instead of believing what it finds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.checkpoint.draft import FILES_NOTE, check_tensors
from dspark.checkpoint.foreign import format_of
from dspark.checkpoint.layout import meta_draft, tensor_shapes
from dspark.checkpoint.published import CONFIG, PROVENANCE, read_config, read_raw
from dspark.checkpoint.quantization import (
    FIELD,
    FP8,
    SCALE,
    linear_names,
    quantization_block,
)
from dspark.checkpoint.shards import INDEX, Weights, open_weights
from dspark.checkpoint.tensorfile import TensorFile
from dspark.checkpoint.writer import TensorSpec, file_order, header_bytes, index_of
from dspark.config.architecture import DraftConfig
from dspark.errors import CheckpointError, QuantizationError
from dspark.quantize.manifest import FileRecord, RecipeRecord, Side
from dspark.quantize.recipe import Choice, check_patterns, choose

QUANTIZED_FROM = "quantized_from"
"""Key of the provenance block: recipe, and hash of the source's config.json."""

SOURCE_DTYPES = ("BF16", "F16", "F32")
"""What is quantized. Wider numbers would be rounded twice, to fp32 and then to e4m3."""


@dataclass(frozen=True)
class OutFile:
    """A weight file to be: its header, and where each tensor's bytes begin in the file."""

    header: bytes
    specs: tuple[TensorSpec, ...]
    offsets: dict[str, int]
    size: int


@dataclass(frozen=True)
class Plan:
    """See the module docstring. ``order`` are the source's tensors as they are gone through."""

    source: Path
    weights: Weights
    config: DraftConfig
    recipe: RecipeRecord
    choice: Choice
    files: dict[str, OutFile]
    home: dict[str, str]
    order: tuple[str, ...]
    small_files: dict[str, bytes]

    @property
    def fp8(self) -> frozenset[str]:
        """Names of the weights that become codes."""
        return frozenset(f"{name}.weight" for name in self.choice.linears)

    @property
    def source_bytes(self) -> int:
        """Of tensor data."""
        return sum(entry.bytes for entry in self.weights.entries.values())

    @property
    def out_bytes(self) -> int:
        """Of all weight files, headers included."""
        return sum(file.size for file in self.files.values())


def make_plan(
    source: Path, recipe: str, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Plan:
    """Read config and headers of ``source`` and lay out what it becomes.

    Raises:
        QuantizationError: it is quantized already, or of a format that has to be converted first.
        CheckpointError: no sound draft: a tensor is missing, too much, or of a wrong dtype.
        ConfigError: the recipe, see :func:`~dspark.quantize.recipe.choose`.
    """
    raw = read_raw(source)
    _check_kind(source, raw)
    weights = open_weights(source)
    _check_not_fp8(weights)
    config, provenance = read_config(source)
    shapes, linears = tensor_shapes(config), linear_names(meta_draft(config))
    check_tensors(weights, shapes, frozenset(), provenance)
    choice = choose(config.flavour, config.num_hidden_layers, linears, recipe, include, exclude)
    check_patterns(choice, linears)
    for name in choice.linears:
        _check_dtype(weights, f"{name}.weight")
    files = {f.path.name: _out_file(f, choice) for f in weights.files}
    record = RecipeRecord(name=recipe, include=tuple(include), exclude=tuple(exclude))
    small = {CONFIG: _config_bytes(source, raw, choice, record)}
    home = {spec.name: name for name, file in files.items() for spec in file.specs}
    if len(files) > 1:
        specs = [spec for file in files.values() for spec in file.specs]
        small[INDEX] = _json_bytes(index_of(specs, home))
    order = tuple(e.name for f in weights.files for e in sorted(
        f.entries.values(), key=lambda e: e.start))  # fmt: skip
    return Plan(source, weights, config, record, choice, files, home, order, small)


def source_side(plan: Plan) -> Side:
    """Hashes of the source's small files and headers, read again."""
    index = plan.source / INDEX
    return Side(
        config_sha256=_sha256((plan.source / CONFIG).read_bytes()),
        index_sha256=_sha256(index.read_bytes()) if index.exists() else None,
        files={f.path.name: _file_record(f) for f in plan.weights.files},
    )


def out_side(plan: Plan) -> Side:
    """The same of what comes out."""
    small = plan.small_files
    return Side(
        config_sha256=_sha256(small[CONFIG]),
        index_sha256=_sha256(small[INDEX]) if INDEX in small else None,
        files={
            name: FileRecord(bytes=file.size, header_sha256=_sha256(file.header))
            for name, file in plan.files.items()
        },
    )


def _check_kind(source: Path, raw: dict[str, Any]) -> None:
    if FIELD in raw:
        raise QuantizationError(
            expected="a draft in float",
            found="one that is quantized already",
            where=str(source / CONFIG),
            fix="Quantize the draft it was made from: rounding twice loses twice.",
        )
    kind = format_of(raw)
    if kind != "dspark":
        raise QuantizationError(
            expected="a checkpoint in dspark's own format",
            found=f"one of {kind}",
            where=str(source / CONFIG),
            fix="Convert it first: load it with dspark and save it again.",
        )


def _check_not_fp8(weights: Weights) -> None:
    for name, entry in weights.entries.items():
        if entry.dtype.startswith("F8_"):
            raise QuantizationError(
                expected="weights in float",
                found=f"{name} in {entry.dtype}: quantized already, though config.json is silent",
                where=weights.where,
                fix="Quantize the draft it was made from: rounding twice loses twice.",
            )


def _check_dtype(weights: Weights, name: str) -> None:
    found = weights.entries[name].dtype
    if found not in SOURCE_DTYPES:
        raise CheckpointError(
            expected=f"{name} in {', '.join(SOURCE_DTYPES)}",
            found=found,
            where=weights.where,
            fix="Export the draft in bfloat16 first.",
        )


def _out_file(source: TensorFile, choice: Choice) -> OutFile:
    fp8 = {f"{name}.weight" for name in choice.linears}
    specs: list[TensorSpec] = []
    for entry in source.entries.values():
        if entry.name in fp8:
            specs.append(TensorSpec(entry.name, FP8, entry.shape))
            specs.append(TensorSpec(entry.name + SCALE, "F32", (entry.shape[0], 1)))
        else:
            specs.append(TensorSpec(entry.name, entry.dtype, entry.shape))
    specs.sort(key=file_order)
    header = header_bytes(specs)
    offsets, at = {}, len(header)
    for spec in specs:
        offsets[spec.name] = at
        at += spec.bytes
    return OutFile(header, tuple(specs), offsets, at)


def _config_bytes(source: Path, raw: dict[str, Any], choice: Choice, recipe: RecipeRecord) -> bytes:
    """The source's fields in their order, with the block and a note of where it is from."""
    told = {k: v for k, v in raw.get(PROVENANCE, {}).items() if k != FILES_NOTE}
    told[QUANTIZED_FROM] = {
        "config_sha256": _sha256((source / CONFIG).read_bytes()),
        "recipe": recipe.model_dump(mode="json"),
    }
    fields = {key: value for key, value in raw.items() if key != PROVENANCE}
    fields[FIELD] = quantization_block(choice.ignore)
    return _json_bytes({**fields, PROVENANCE: told})


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _file_record(file: TensorFile) -> FileRecord:
    with open(file.path, "rb") as stream:
        header = stream.read(file.data_start)
    return FileRecord(bytes=file.path.stat().st_size, header_sha256=_sha256(header))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
