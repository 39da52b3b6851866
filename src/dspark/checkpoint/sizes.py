"""What a target would cost, known from its config alone: no weight is read, no model downloaded.

A plan asks before anything is there. Of a hub id only ``config.json`` is fetched, at the revision
the recipe names; a GGUF's header and a folder's config are read. Parameters are counted on a model
without storage, so the number is that of the family's own code and not a formula's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.checkpoint.gguf import GGUFFile, require_gguf
from dspark.checkpoint.pretrained import count_parameters, read_config, text_sizes
from dspark.checkpoint.source import CONFIG_FILES, TargetFiles, fetch
from dspark.checkpoint.target import shape_of
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig, TargetShape, check_shape
from dspark.model.target import DecoderTarget

WIDTH = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target: what a draft depends on, and what it weighs.

    ``active`` are the parameters one token goes through, fewer than all in a mixture of experts
    whose recipe says so. ``row_bytes`` is what one token takes in the caches of all layers.
    ``own_decoder``: our decoder runs it, which keeps a second, packed copy of its matrices on a
    CPU. ``state_bytes`` are a hybrid's recurrent states of one request.
    """

    shape: TargetShape
    parameters: int
    active: int
    row_bytes: int
    own_decoder: bool
    state_bytes: int = 0


def read_sizes(section: TargetSection, files: TargetFiles) -> TargetSizes:
    """Sizes of the target in ``files``, or those the recipe writes down (``target.sizes``).

    Raises:
        ConfigError: ``target.max_context`` is beyond the target's own.
        TargetError: no such target, no network, or a config that cannot be read.
        MissingDependencyError: an optional package is needed (names it or the extra).
    """
    if section.sizes is not None:
        return _told(shape_of(section, section.sizes.model_dump()), section.sizes, section)
    width = WIDTH[section.dtype]
    if section.make is not None:
        made = section.make.target_config
        return _own(shape_of(section, made.model_dump()), made, width)
    files = fetch(files, CONFIG_FILES)
    if files.gguf is not None:
        require_gguf(section.source)
        file = GGUFFile(files)
        if file.covered:
            config = file.config()
            return _own(shape_of(section, config.model_dump()), config, width)
    whole = read_config(files)
    sizes = text_sizes(files, whole)
    shape = shape_of(section, sizes)
    try:
        return _own(shape, TargetConfig.from_hf(sizes), width)
    except ValueError:  # a family the adapter runs
        row = shape.num_hidden_layers * _adapter_row(shape, sizes) * width
        count = count_parameters(files, whole)
        return TargetSizes(shape, count, count, row, own_decoder=False)


def check_told(section: TargetSection, files: TargetFiles) -> None:
    """Compare ``target.sizes`` with the config of the target in ``files``, which are here.

    Raises:
        ConfigError: names the size that is not the target's.
        TargetError: a config that cannot be read.
    """
    if section.sizes is None:
        return
    file = GGUFFile(files) if files.gguf is not None else None
    if file is not None and file.covered:
        sizes = file.config().model_dump()
    else:
        sizes = text_sizes(files, read_config(files))
    check_shape(section.sizes, TargetShape.from_hf(sizes))


def _own(shape: TargetShape, config: TargetConfig, width: int) -> TargetSizes:
    with torch.device("meta"):
        model = DecoderTarget(config, ())
        row = model.new_cache(1, 1)
    numbers = sum(part.numel() for parts in row.layers for part in parts)
    parameters = sum(p.numel() for p in model.parameters())
    if config.tie_word_embeddings:
        parameters -= shape.vocab_size * shape.hidden_size  # one matrix, which both share
    dims = model.to(getattr(torch, {4: "float32", 2: "bfloat16"}[width])).state_dims
    states = 0 if dims is None else dims.bytes
    return TargetSizes(
        shape, parameters, parameters, numbers * width, own_decoder=True, state_bytes=states
    )


def _told(shape: TargetShape, told: TargetShape, section: TargetSection) -> TargetSizes:
    """From what a recipe says; a dense decoder is assumed where it names no parameters."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    body = shape.num_hidden_layers * (3 * hidden * inner + 4 * hidden * hidden)
    count = told.parameters or body + 2 * shape.vocab_size * hidden
    row = shape.num_hidden_layers * _adapter_row(shape, {}) * WIDTH[section.dtype]
    return TargetSizes(shape, count, told.active_parameters or count, row, own_decoder=False)


def _adapter_row(shape: TargetShape, sizes: dict[str, Any]) -> int:
    """Numbers that transformers caches of one token and layer; latent attention is expanded."""
    if sizes.get("kv_lora_rank"):
        head = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + sizes["v_head_dim"]
        return shape.num_attention_heads * int(head)
    return 2 * shape.num_key_value_heads * shape.head_dim
