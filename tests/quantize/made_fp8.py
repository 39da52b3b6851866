"""Tiny drafts and their FP8 checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.checkpoint.shards import WEIGHTS
from dspark.config.architecture import DraftConfig
from dspark.quantize.convert import quantize
from dspark.quantize.manifest import PtqManifest
from dspark.quantize.plan import make_plan
from made_drafts import saved_draft


def source(folder: Path, config: DraftConfig | None = None, **options: Any) -> Path:
    """A draft in bfloat16 (unless ``dtype`` says otherwise)."""
    saved_draft(folder, options.pop("dtype", torch.bfloat16), config)
    return folder


def convert(source_folder: Path, out: Path, recipe: str = "phase1", **options: Any) -> PtqManifest:
    return quantize(make_plan(source_folder, recipe, **options), out)


def pair(folder: Path, config: DraftConfig | None = None, recipe: str = "phase1") -> Path:
    """``folder/source`` and ``folder/out``; returns the second."""
    convert(source(folder / "source", config), folder / "out", recipe)
    return folder / "out"


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a checkpoint with one file."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder
