"""A new, untrained draft on disk, written tensor by tensor.

Its numbers are those that training starts from with the same seed (``dspark.model.init``), and its
memory does not grow with the draft: the 7.1 GB of a Kimi-K3 draft take a few hundred MiB. Engines
load it and draft nonsense, which is what one needs to measure them or to try a deployment before
any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dspark.artifacts import atomic_folder
from dspark.checkpoint.draft import TARGET_NOTE, write_config
from dspark.checkpoint.embedding import TargetEmbedding
from dspark.checkpoint.layout import EMBEDDING, tensor_shapes
from dspark.checkpoint.writer import (
    TensorSpec,
    Written,
    require_room,
    specs_of,
    tensor_pieces,
    write_weights,
)
from dspark.config.architecture import DraftConfig
from dspark.errors import ConfigError
from dspark.model.init import start_pieces

START_NOTE = "start"
"""Key of an untrained draft's provenance: ``seed``, and ``embedding``, "random" or "target"."""


def write_start(
    folder: Path,
    config: DraftConfig,
    provenance: dict[str, Any],
    *,
    dtype: torch.dtype,
    seed: int,
    embedding: TargetEmbedding | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write weights and config.json into the new ``folder``: all of it or nothing.

    Args:
        folder: must not exist, or be empty.
        config: the draft.
        provenance: goes into config.json; seed and origin of the embedding are added.
        dtype: of every tensor.
        seed: of the random start.
        embedding: the target's; random without one.
        on_bytes: told how many bytes have been written since the last call.

    Raises:
        ConfigError: the embedding is of another target than ``config``.
        StorageError: not enough room, or not writable.
        ForeignArtifactError: ``folder`` holds something.
    """
    shapes = tensor_shapes(config)
    if embedding is not None and embedding.shape != shapes[EMBEDDING]:
        raise ConfigError(
            expected=f"a target with an embedding of shape {shapes[EMBEDDING]}",
            found=str(embedding.shape),
            where="target.source",
            fix="Correct target.sizes, or name the target that the draft is for.",
        )

    def pieces(spec: TensorSpec) -> Iterator[memoryview]:
        source = start_pieces(spec.name, spec.shape, config.num_hidden_layers, seed)
        if spec.name == EMBEDDING and embedding is not None:
            source = embedding.pieces()
        for piece in source:
            yield from tensor_pieces(piece, dtype)

    specs = specs_of(shapes, dtype)
    require_room(folder, sum(spec.bytes for spec in specs))
    with atomic_folder(folder) as partial:
        written = write_weights(
            partial, specs, pieces, hashed=frozenset({EMBEDDING}), on_bytes=on_bytes
        )
        digest = written.digests[EMBEDDING]
        start = {"seed": seed, "embedding": "random" if embedding is None else "target"}
        told = {**provenance, START_NOTE: start}
        if embedding is not None:
            told[TARGET_NOTE] = digest
        write_config(partial, config, dtype, told, digest, files=written.files)
    return written
