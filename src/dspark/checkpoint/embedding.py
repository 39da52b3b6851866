"""A target's embedding alone, without loading the target.

A draft carries the target's embedding, and nothing else of it is needed to start one. From
safetensors it is read in pieces, so that a target of a terabyte costs no more than its table; a
GGUF stores it quantized and is read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark.checkpoint.shards import Weights, open_weights
from dspark.checkpoint.source import TargetFiles
from dspark.checkpoint.target import load_target
from dspark.checkpoint.tensors import WEIGHT_DTYPES
from dspark.config.recipe import TargetSection
from dspark.errors import TargetError

SUFFIX = "embed_tokens.weight"


@dataclass(frozen=True)
class TargetEmbedding:
    """Shape [V, H], and the numbers as flat pieces in the dtype the target's files hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]


def target_embedding(section: TargetSection, files: TargetFiles) -> TargetEmbedding:
    """The embedding of fetched ``files``.

    Raises:
        TargetError: no embedding, several of them, or one that is quantized.
        CheckpointError: damaged weights.
    """
    if files.gguf is not None:
        weight = load_target(section, files).build((0,)).embedding_weight()
        return TargetEmbedding(
            tuple(weight.shape), weight.dtype, lambda: iter([weight.reshape(-1)])
        )
    weights = open_weights(Path(files.location))
    names = [n for n in weights.entries if n == SUFFIX or n.endswith(f".{SUFFIX}")]
    entry = weights.entries[names[0]] if len(names) == 1 else None
    if entry is None or entry.dtype not in WEIGHT_DTYPES:
        found = f"{len(names)} tensors of that name" if entry is None else f"one in {entry.dtype}"
        raise TargetError(
            expected=f"one tensor named {SUFFIX} in float",
            found=found,
            where=f"target.source {files.source}",
            fix="Start with --embedding random; training puts the target's in.",
        )
    dtype = WEIGHT_DTYPES[entry.dtype]
    return TargetEmbedding(entry.shape, dtype, lambda: _read(weights, entry.name, dtype))


def _read(weights: Weights, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    for piece in weights.pieces(name):
        yield torch.frombuffer(piece, dtype=dtype)
