"""A finished draft as a folder that engines load: weights, config.json, model card.

Nothing is converted on the way but the dtype, if another is asked for. Every number is checked
again, the embedding against the hash of the target's (public exports carried random ones), and the
folder appears whole or not at all. A *slim* export leaves the embedding out, a third of a Kimi-K3
draft: vLLM and ATOM take the target's own in any case, and so does our loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from dspark.artifacts import atomic_folder, atomic_write
from dspark.checkpoint.draft import (
    EMBEDDING_NOTE,
    TARGET_NOTE,
    check_notes,
    check_tensors,
    write_config,
)
from dspark.checkpoint.foreign import CONVERTED
from dspark.checkpoint.layout import EMBEDDING, Shape, tensor_shapes
from dspark.checkpoint.published import CONFIG, read_config, read_raw
from dspark.checkpoint.quantization import FIELD
from dspark.checkpoint.shards import Weights, open_weights
from dspark.checkpoint.soundness import require_sound
from dspark.checkpoint.tensors import FORMAT_NAMES, WEIGHT_DTYPES
from dspark.checkpoint.writer import (
    TensorSpec,
    Written,
    require_room,
    tensor_pieces,
    write_weights,
)
from dspark.config.architecture import DraftConfig, Flavour
from dspark.errors import CheckpointError

CARD = "README.md"


@dataclass(frozen=True)
class Exportable:
    """A draft whose config, names, shapes and dtypes have been checked."""

    folder: Path
    config: DraftConfig
    provenance: dict[str, Any]
    weights: Weights
    shapes: dict[str, Shape]

    @property
    def stored(self) -> torch.dtype:
        """The dtype most of its bytes are in."""
        sizes: dict[str, int] = {}
        for entry in self.weights.entries.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
        return WEIGHT_DTYPES[max(sizes, key=sizes.__getitem__)]


def open_export(folder: Path, to: Flavour) -> Exportable:
    """Check what a header can tell before anything is written.

    Raises:
        CheckpointError: not a sound draft, another flavour than ``to``, or one of another tool.
    """
    config, provenance = read_config(folder)
    where = str(folder / CONFIG)
    if config.flavour != to:
        what = {"k3": "latent rows (MLA)", "qwen3": "grouped keys and values (GQA)"}
        _refuse(
            where,
            f"a draft of flavour {to}, which attends over {what[to]}",
            f"one of flavour {config.flavour}, which attends over {what[config.flavour]}",
            f"Export it --to {config.flavour}, or train one with draft.flavour={to}: the weights "
            "of one attention say nothing about the other.",
        )
    if CONVERTED in provenance:
        _refuse(
            where,
            "a draft that dspark wrote",
            f"one in the format of {provenance[CONVERTED]}",
            "It is published already; train from it with train.init_from to make it yours.",
        )
    if FIELD in read_raw(folder):
        _refuse(
            where,
            "a draft in float",
            "a quantized one",
            "Export the draft it was quantized from, then quantize the export.",
        )
    weights, shapes = open_weights(folder), tensor_shapes(config)
    check_tensors(weights, shapes, frozenset(), provenance)
    check_notes(provenance, where)
    return Exportable(folder, config, provenance, weights, shapes)


def write_export(
    source: Exportable,
    out: Path,
    *,
    dtype: torch.dtype | None,
    slim: bool,
    told: dict[str, Any],
    card: Callable[[Written], str],
    max_shard_bytes: int | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write the export into the new folder ``out``.

    Args:
        source: from :func:`open_export`.
        out: must not exist, or be empty.
        dtype: of every tensor; None keeps each as it is.
        slim: leave the embedding out.
        told: added to the provenance.
        card: the model card, given what was written.
        max_shard_bytes: spread the weights over files of at most this size.
        on_bytes: told how many bytes have been written since the last call.

    Raises:
        CheckpointError: a number that is not finite (also: not in ``dtype``), an embedding that is
            not the recorded one, or a slim source that cannot become what is asked.
        StorageError: not enough room, or not writable.
    """
    specs = {
        name: TensorSpec(name, FORMAT_NAMES[dtype] if dtype else entry.dtype, entry.shape)
        for name, entry in source.weights.entries.items()
    }
    digest = _embedding_digest(source, specs.get(EMBEDDING), dtype, slim=slim)
    if slim:
        specs.pop(EMBEDDING, None)
    require_room(out, sum(spec.bytes for spec in specs.values()))
    provenance = {**source.provenance, **told}
    if TARGET_NOTE in provenance:
        provenance[TARGET_NOTE] = digest  # proved equal before, and rounded alike
    with atomic_folder(out) as partial:
        written = write_weights(
            partial,
            list(specs.values()),
            lambda spec: _pieces(source, spec),
            max_shard_bytes=max_shard_bytes,
            on_bytes=on_bytes,
        )
        kind = dtype or source.stored
        files = written.files
        write_config(partial, source.config, kind, provenance, digest, files=files, slim=slim)
        atomic_write(partial / CARD, card(written))
    return written


def _pieces(source: Exportable, spec: TensorSpec) -> Iterator[memoryview]:
    for numbers in _numbers(source, spec.name):
        for cast in tensor_pieces(numbers, WEIGHT_DTYPES[spec.dtype]):
            written = torch.frombuffer(cast, dtype=WEIGHT_DTYPES[spec.dtype])
            require_sound(source.weights.where, f"{spec.name} in {spec.dtype}", written)
            yield cast


def _numbers(source: Exportable, name: str) -> Iterator[Tensor]:
    dtype = WEIGHT_DTYPES[source.weights.entries[name].dtype]
    for piece in source.weights.pieces(name):
        yield torch.frombuffer(piece, dtype=dtype)


def _embedding_digest(
    source: Exportable, spec: TensorSpec | None, dtype: torch.dtype | None, *, slim: bool
) -> str:
    """sha256 of the embedding as exported; the stored one must have the recorded hash."""
    note = source.provenance.get(EMBEDDING_NOTE)
    recorded = note.get("sha256") if isinstance(note, dict) else None
    where = source.weights.where
    if spec is None:
        # Only a draft that calls itself slim gets here without an embedding.
        assert isinstance(note, dict)
        if not slim or (dtype is not None and FORMAT_NAMES[dtype] != note.get("dtype")):
            _refuse(
                where,
                "a draft with its embedding",
                "a slim one",
                "Add --slim and leave --dtype out, or export the draft it was made from.",
            )
        return str(recorded)
    stored, exported = hashlib.sha256(), hashlib.sha256()
    for numbers in _numbers(source, EMBEDDING):
        for raw in tensor_pieces(numbers, numbers.dtype):
            stored.update(raw)
        for cast in tensor_pieces(numbers, WEIGHT_DTYPES[spec.dtype]):
            exported.update(cast)
    if recorded is not None and stored.hexdigest() != recorded:
        _refuse(
            where,
            f"{EMBEDDING} with sha256 {str(recorded)[:12]}",
            stored.hexdigest()[:12],
            "The file was changed after it was made; make it again.",
        )
    return exported.hexdigest()


def _refuse(where: str, expected: str, found: str, fix: str) -> NoReturn:
    raise CheckpointError(expected=expected, found=found, where=where, fix=fix)
