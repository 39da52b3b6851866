"""Loading a target once and handing it out in the precision a stage needs.

transformers reads config, tokenizer and weights (``dspark.checkpoint.pretrained``); our decoder
runs them when it covers the family, and the transformers adapter otherwise. GGUF weights of covered
families are read without it (``dspark.checkpoint.gguf``), which is much faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.checkpoint.gguf import GGUFFile, require_gguf
from dspark.checkpoint.identity import FileHashes, file_hashes
from dspark.checkpoint.k3 import K3Config, read_k3
from dspark.checkpoint.pretrained import read_config, read_model, read_tokenizer, text_sizes
from dspark.checkpoint.source import TargetFiles, fetch, find_target, first_line, weight_files
from dspark.checkpoint.tokenizer import listed_ids
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig, TargetShape, check_shape
from dspark.errors import ConfigError, TargetError
from dspark.model.hf_target import HFTarget
from dspark.model.target import DecoderTarget, Target
from dspark.model.weights import target_state

Precision = Literal["float32", "bfloat16"]


@dataclass
class LoadedTarget:
    """A target's weights, tokenizer and sizes; :meth:`build` makes runnable targets.

    ``end_ids`` are the generation config's end-of-sequence ids (may be empty). ``config`` is None
    when only the adapter can run it, for ``adapter_reason``. Weights are held once: as the state of
    our decoder or as the transformers model the adapter runs.
    """

    files: TargetFiles
    tokenizer: Any
    shape: TargetShape
    config: TargetConfig | None
    adapter_reason: str
    dtype: torch.dtype
    device: torch.device
    end_ids: tuple[int, ...]
    _state: dict[str, Tensor] = field(repr=False)
    _hf_model: Any = field(repr=False)
    _built: dict[tuple[Any, ...], Target] = field(default_factory=dict, repr=False)

    @cached_property
    def hashes(self) -> FileHashes:
        """Identity of the files; tens of megabytes are read for it, once."""
        return file_hashes(self.files)

    @property
    def num_layers(self) -> int:
        return self.shape.num_hidden_layers

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together, as the recipe limits them."""
        return self.shape.max_position_embeddings

    def build(self, layer_ids: tuple[int, ...], precision: Precision = "float32") -> Target:
        """A target that taps ``layer_ids``; CPU products are prepacked in ``precision``.

        Equal calls share one instance. ``precision`` never raises the loaded dtype.
        """
        key = (layer_ids, precision)
        if key not in self._built:
            self._built[key] = self._make(layer_ids, precision)
        return self._built[key]

    def _make(self, layer_ids: tuple[int, ...], precision: Precision) -> Target:
        if self.config is None:
            adapter = HFTarget(self._hf_model.to(self.device), layer_ids)
            adapter.max_context = min(adapter.max_context, self.max_context)
            return adapter
        with torch.device("meta"):
            target = DecoderTarget(self.config, layer_ids)
        target.load_state_dict(self._state, assign=True)
        target = target.to(device=self.device, dtype=self.dtype).eval()
        target.requires_grad_(False)
        target.max_context = min(target.max_context, self.max_context)
        if self.device.type == "cpu":
            target.pack(getattr(torch, precision) if precision == "bfloat16" else None)
        return target


def load_target(section: TargetSection, files: TargetFiles | None = None) -> LoadedTarget:
    """Load what ``section`` names, from ``files`` when they have been fetched before.

    Raises:
        ConfigError: ``target.max_context`` is beyond the target's own, ``target.sizes`` say
            otherwise than the target, or no such device.
        TargetError: unreadable or incomplete, or a hub id without a network.
        MissingDependencyError: an optional package is needed (names it or the extra).
    """
    files = files or fetch(find_target(section.source, section.revision))
    weight_files(files)  # refuses what has none before anything slow
    device = _device(section.device)
    if files.gguf is not None:
        require_gguf(section.source)
        file = GGUFFile(files)
        if file.covered:
            return _from_gguf(section, files, file, device)
    return _from_transformers(section, files, device)


def _from_gguf(
    section: TargetSection, files: TargetFiles, file: GGUFFile, device: torch.device
) -> LoadedTarget:
    dtype = getattr(torch, section.dtype)
    config = file.config()
    shape = shape_of(section, config.model_dump())
    state = target_state(config, file.state(dtype))
    tokenizer = read_tokenizer(files)
    return LoadedTarget(
        files, tokenizer, shape, config, "", dtype, device, file.end_ids(), state, None
    )


def _from_transformers(
    section: TargetSection, files: TargetFiles, device: torch.device
) -> LoadedTarget:
    dtype = getattr(torch, section.dtype)
    whole = read_config(files)
    sizes = text_sizes(files, whole)
    shape = shape_of(section, sizes)
    tokenizer = read_tokenizer(files)
    if isinstance(whole, K3Config):
        return _from_k3(section, files, whole, shape, tokenizer, device)
    model: Any = read_model(files, whole, dtype)
    config, state, reason = None, {}, ""
    try:
        config = TargetConfig.from_hf(sizes)
        state = target_state(config, model.state_dict())
    except ValueError as error:
        reason = str(error)
    except TargetError as error:
        config, reason = None, error.found
    ends = listed_ids(model.generation_config.eos_token_id)
    model = model if config is None else None
    return LoadedTarget(files, tokenizer, shape, config, reason, dtype, device, ends, state, model)


def _from_k3(
    section: TargetSection, files: TargetFiles, whole: K3Config, shape: TargetShape, tokenizer: Any,
    device: torch.device,
) -> LoadedTarget:  # fmt: skip
    dtype = getattr(torch, section.dtype)
    try:
        config = TargetConfig.from_hf(whole.to_dict())
    except ValueError as error:
        raise TargetError(
            expected="a variant of Kimi-K3 that our decoder runs (transformers runs none)",
            found=str(error),
            where=f"target.source {section.source}",
            fix="Use a checkpoint in plain floats, or another target.",
        ) from error
    tensors, ends = read_k3(files, dtype)
    state = target_state(config, tensors)
    return LoadedTarget(files, tokenizer, shape, config, "", dtype, device, ends, state, None)


def shape_of(section: TargetSection, sizes: dict[str, Any]) -> TargetShape:
    """Sizes under a transformers config's names, with the context the recipe asks for.

    Raises:
        ConfigError: the recipe asks for a longer context than the target has, or its
            ``target.sizes`` say otherwise than the target (names the key).
    """
    if section.sizes is not None:
        check_shape(section.sizes, TargetShape.from_hf(sizes))
    limit = sizes.get("max_position_embeddings")
    if limit is not None and section.max_context > limit:
        raise ConfigError(
            expected=f"at most {limit}, the longest context this target was made for",
            found=str(section.max_context),
            where="target.max_context",
            fix=f"Set target.max_context to {limit} or less.",
        )
    return TargetShape.from_hf(sizes).within(section.max_context)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            expected="a device of this machine that torch can use",
            found=f"{name} ({first_line(error)})",
            where="target.device",
            fix="Use auto, cpu, or for instance cuda:0.",
        ) from error
    return device
