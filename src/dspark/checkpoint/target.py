"""Loading a target once and handing it out in the precision a stage needs.

transformers reads config, tokenizer and weights (it knows every format); our decoder runs them when
it covers the family, and the transformers adapter otherwise. The identity of what was loaded goes
into artifacts and into the draft's provenance.
"""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.checkpoint.source import (
    LOCAL_ALTERNATIVE,
    TargetFiles,
    fetch,
    find_target,
    first_line,
)
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig
from dspark.errors import MissingDependencyError, TargetError
from dspark.model.hf_target import HFTarget
from dspark.model.target import DecoderTarget, Target
from dspark.model.weights import target_state

Precision = Literal["float32", "bfloat16"]


@dataclass
class LoadedTarget:
    """A target's weights, tokenizer and identity; :meth:`build` makes runnable targets.

    ``end_ids`` are the generation config's end-of-sequence ids (may be empty). ``config`` is None
    when only the adapter can run it.
    """

    files: TargetFiles
    tokenizer: Any
    hf_model: Any
    config: TargetConfig | None
    adapter_reason: str
    dtype: torch.dtype
    device: torch.device
    end_ids: tuple[int, ...]
    max_context: int
    _state: dict[str, Tensor] | None = field(default=None, repr=False)
    _built: dict[tuple[Any, ...], Target] = field(default_factory=dict, repr=False)

    @property
    def num_layers(self) -> int:
        return int(self.hf_model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.hf_model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.hf_model.config.get_text_config().vocab_size)

    def build(self, layer_ids: tuple[int, ...], precision: Precision = "float32") -> Target:
        """A target that taps ``layer_ids``; CPU products are prepacked in ``precision``.

        Equal calls share one instance. ``precision`` never raises the loaded dtype.
        """
        key = (layer_ids, precision)
        if key not in self._built:
            self._built[key] = self._make(layer_ids, precision)
        return self._built[key]

    def _make(self, layer_ids: tuple[int, ...], precision: Precision) -> Target:
        if self.config is None or self._state is None:
            adapter = HFTarget(self.hf_model.to(self.device), layer_ids)
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
        TargetError: unreadable, or a hub id without a network.
        MissingDependencyError: GGUF support is not installed (names the extra).
    """
    files = files or fetch(find_target(section.source, section.revision))
    if files.gguf is not None:
        _require_gguf(section.source)
    dtype = getattr(torch, section.dtype)
    model, tokenizer = _read(files, dtype)
    raw = model.config.get_text_config().to_dict()
    if files.gguf is not None:
        # transformers has expanded the weights to ``dtype`` already and only remembers the origin.
        raw.pop("quantization_config", None)
    config, state, reason = None, None, ""
    try:
        config = TargetConfig.from_hf(raw)
        state = target_state(config, model.state_dict())
    except ValueError as error:
        reason = str(error)
    except TargetError as error:
        config, reason = None, error.found
    eos = getattr(model.generation_config, "eos_token_id", None)
    ends = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    name = section.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
    return LoadedTarget(
        files=files,
        tokenizer=tokenizer,
        hf_model=model.eval().requires_grad_(False),
        config=config,
        adapter_reason=reason,
        dtype=dtype,
        device=torch.device(name),
        end_ids=ends,
        max_context=min(limit, section.max_context),
        _state=state,
    )


def _require_gguf(source: str) -> None:
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise MissingDependencyError(
            expected="the packages gguf and accelerate, to read GGUF weights",
            found=f"not installed: {', '.join(missing)}",
            where=f"target.source {source}",
            fix="pip install 'dspark[gguf]'",
        )


def _read(files: TargetFiles, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": files.gguf} if files.gguf else {}
    try:
        # The GGUF reader draws bars of its own on stderr, through ours.
        with redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(files.location, **options)
            model = AutoModelForCausalLM.from_pretrained(files.location, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            expected="a causal language model that transformers can load",
            found=first_line(error),
            where=f"target.source {files.source}",
            fix=LOCAL_ALTERNATIVE,
        ) from error
    return model, tokenizer
