"""Which tensors a draft consists of, by name and shape, and what they add up to.

The module itself is the only description: it is built on the meta device, where a draft of any size
costs neither memory nor time, and its state dict is read off. Loader, writer, plan and ``inspect``
all ask here, so that none of them has a second list of names to keep in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dspark.config.architecture import DraftConfig
from dspark.model.draft import DSparkDraft

EMBEDDING = "embed_tokens.weight"
"""The target's own embedding: frozen in training, and left out of a slim checkpoint."""

Shape = tuple[int, ...]


def meta_draft(config: DraftConfig) -> DSparkDraft:
    """The draft of ``config`` without storage (meta device)."""
    with torch.device("meta"):
        return DSparkDraft(config)


def tensor_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Checkpoint name -> shape of every tensor, in the module's order."""
    return {name: tuple(t.shape) for name, t in meta_draft(config).state_dict().items()}


@dataclass(frozen=True)
class ModulePart:
    """One row of the module table: a top-level module or a layer."""

    name: str
    tensors: int
    parameters: int


def parameters(shapes: Mapping[str, Shape]) -> int:
    """How many numbers the tensors hold."""
    return sum(math.prod(shape) for shape in shapes.values())


def trainable_parameters(shapes: Mapping[str, Shape]) -> int:
    """All but the target's frozen embedding."""
    return parameters({name: shape for name, shape in shapes.items() if name != EMBEDDING})


def parts(shapes: Mapping[str, Shape]) -> list[ModulePart]:
    """Tensors grouped by module: ``layers.0``, ``markov_head``, ... in order of appearance."""
    groups: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        pieces = name.split(".")
        group = ".".join(pieces[: 2 if pieces[0] == "layers" else 1])
        groups.setdefault(group, {})[name] = shape
    return [ModulePart(name, len(own), parameters(own)) for name, own in groups.items()]
