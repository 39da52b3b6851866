"""What ``dspark inspect`` says of a draft: one planned by a recipe, or one in a checkpoint folder.

A recipe needs no target here when it writes ``target.sizes``. A checkpoint is described as far as
it can be read: what is wrong with it is listed instead of hiding what is right.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.checkpoint.draft import (
    check_notes,
    check_tensors,
    is_slim,
    quantized_linears,
    verify_weights,
)
from dspark.checkpoint.engines import engine_views
from dspark.checkpoint.layout import (
    EMBEDDING,
    Shape,
    meta_draft,
    parameters,
    parts,
    tensor_shapes,
    trainable_parameters,
)
from dspark.checkpoint.published import CONFIG, read_config
from dspark.checkpoint.quantization import SCALE
from dspark.checkpoint.shards import INDEX, WEIGHTS, Weights, open_weights
from dspark.checkpoint.tensorfile import ITEM_BYTES
from dspark.checkpoint.tensors import FORMAT_NAMES, WEIGHT_DTYPES
from dspark.cli.console import Screen
from dspark.cli.context import RunContext
from dspark.config.architecture import DraftConfig
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config
from dspark.errors import DSparkError


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder without manifest looks like a checkpoint."""
    return any((folder / name).exists() for name in (CONFIG, WEIGHTS, INDEX))


def describe_recipe(path: Path) -> dict[str, Any]:
    """The draft that a recipe makes, in numbers.

    Raises:
        ConfigError: the recipe's fault.
        TargetError: the recipe writes no ``target.sizes`` and its target cannot be found.
    """
    import torch

    recipe = load_recipe(path)
    config = draft_config(recipe.draft, RunContext(recipe, "").shape)
    shapes = tensor_shapes(config)
    dtype = FORMAT_NAMES[getattr(torch, recipe.target.dtype)]
    return {
        "path": str(path),
        "kind": "recipe",
        "name": recipe.name,
        "target": recipe.target.source,
        **_sizes(shapes, dict.fromkeys(shapes, dtype)),
        **_conventions(config, dtype),
    }


def describe_checkpoint(folder: Path, *, deep: bool, screen: Screen | None) -> dict[str, Any]:
    """A draft checkpoint: its tensors, conventions and faults; ``deep`` reads every number."""
    out: dict[str, Any] = {"path": str(folder), "kind": "checkpoint"}
    faults: list[DSparkError] = []
    config, weights = None, None
    provenance: dict[str, Any] = {}
    try:
        config, provenance = read_config(folder)
    except DSparkError as error:
        faults.append(error)
    try:
        weights = open_weights(folder)
    except DSparkError as error:
        faults.append(error)
    if weights is not None:
        shapes = {name: entry.shape for name, entry in weights.entries.items()}
        out |= _sizes(shapes, {name: entry.dtype for name, entry in weights.entries.items()})
        out["files"] = {file.path.name: file.path.stat().st_size for file in weights.files}
    if config is not None:
        floats = {d: n for d, n in out.get("bytes", {}).items() if d in WEIGHT_DTYPES}
        dtype = max(floats, key=floats.__getitem__) if floats else "BF16"
        out |= _conventions(config, dtype)
        out["slim"] = is_slim(provenance)
        out["provenance"] = provenance
    try:
        if config is not None and weights is not None:
            fp8 = quantized_linears(folder, meta_draft(config))
            check_tensors(weights, tensor_shapes(config), fp8, provenance)
            check_notes(provenance, str(folder / CONFIG))
        if weights is not None and deep:
            _read_all(weights, provenance, screen)
    except DSparkError as error:
        faults.append(error)
    out["faults"] = [
        {"expected": e.expected, "found": e.found, "where": e.where, "fix": e.fix} for e in faults
    ]
    return out


def _read_all(weights: Weights, provenance: dict[str, Any], screen: Screen | None) -> None:
    if screen is None:
        verify_weights(weights, provenance)
        return
    total = sum(entry.bytes for entry in weights.entries.values())
    with screen.byte_bar("reading weights", total) as on_bytes:
        verify_weights(weights, provenance, on_bytes)


def _sizes(shapes: dict[str, Shape], dtypes: dict[str, str]) -> dict[str, Any]:
    by_dtype: Counter[str] = Counter()
    for name, shape in shapes.items():
        by_dtype[dtypes[name]] += math.prod(shape) * ITEM_BYTES[dtypes[name]]
    scales = [name for name in shapes if name.endswith(f".weight{SCALE}")]
    shapes = {name: shape for name, shape in shapes.items() if name not in scales}
    return {
        "tensors": len(shapes) + len(scales),
        "parameters": parameters(shapes),
        "trainable_parameters": trainable_parameters(shapes),
        "bytes": dict(by_dtype),
        "embedding_included": EMBEDDING in shapes,
        "modules": [asdict(part) for part in parts(shapes)],
    }


def _conventions(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """``dtype`` is that of the cache: engines keep rows in the precision of the weights."""
    row = config.row_width * config.num_hidden_layers
    return {
        "flavour": config.flavour,
        "architecture": config.architecture,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "row_width": config.row_width,
        "cache_elements_per_token": row,
        "cache_bytes_per_token": row * ITEM_BYTES[dtype],
        "engines": [asdict(view) for view in engine_views(config)],
    }
