"""Any other Hugging Face causal language model as a target: slower, same interface.

States come from ``output_hidden_states`` through the one layer-id conversion. Rolling back a
rejected draft means cropping the key-value cache, so models that carry a recurrent state, or a
window that has already forgotten, are refused with the reason: they would go on from a state that
has seen rejected tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.model.cache import Span
from dspark.model.target import TargetOutput, hf_hidden_state_index

_RECURRENT = ("mamba", "rwkv", "recurrent", "linear_attn", "kimi_linear", "jamba", "zamba", "lfm2",
              "falcon_h1", "bamba", "qwen3_next", "granitemoehybrid", "nemotron_h")  # fmt: skip
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


class HFTarget:
    """Adapter of a transformers model; implements :class:`dspark.model.target.Target`."""

    supports_ragged = False

    def __init__(self, model: Any, layer_ids: tuple[int, ...] = ()) -> None:
        config = model.config.get_text_config()
        _refuse(model.config, config)
        self.model = model.eval()
        self.layer_ids = layer_ids
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = int(config.vocab_size)
        self.max_context = int(getattr(config, "max_position_embeddings", 1 << 30))
        self._head = model.get_output_embeddings()
        self._norm = _final_norm(model)

    @property
    def device(self) -> torch.device:
        return self.embedding_weight().device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight().dtype

    def new_cache(self, batch: int, capacity: int) -> Any:
        """A growing cache; ``capacity`` is only a promise of the caller."""
        from transformers import DynamicCache

        return DynamicCache()

    def forward(self, ids: Tensor, span: Span, cache: Any | None) -> TargetOutput:
        """ids [B, T] at ``span`` (same start for the whole batch) -> final states and taps."""
        if span.start is None:
            raise TargetError(
                expected="all sequences of a batch at one position",
                found="a ragged batch",
                where="transformers adapter",
                fix="Decode one request at a time with this target.",
            )
        if cache is not None and cache.get_seq_length() > span.start:
            cache.crop(span.start)
        out = self.model(
            input_ids=ids,
            position_ids=span.positions,
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        states = out.hidden_states
        taps = [states[hf_hidden_state_index(i)] for i in self.layer_ids]
        final = states[-1]
        stacked = torch.stack(taps, -2) if taps else final.new_zeros(*final.shape[:-1], 0, 1)
        return TargetOutput(final, stacked)

    def logits(self, final: Tensor) -> Tensor:
        logits: Tensor = self._head(final)
        return logits

    def embedding_weight(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    def head_weight(self) -> Tensor:
        weight: Tensor = self._head.weight.detach()
        return weight

    def norm(self, h: Tensor) -> Tensor:
        out: Tensor = self._norm(h)
        return out


def _refuse(outer: Any, config: Any) -> None:
    kind = str(getattr(config, "model_type", ""))
    reason = None
    if getattr(outer, "is_encoder_decoder", False):
        reason = "an encoder-decoder, whose states are not one stream"
    elif any(name in kind for name in _RECURRENT):
        reason = f"model_type {kind}, whose recurrent state cannot be rolled back"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        reason = f"a sliding window of {config.sliding_window}, whose cache cannot be cropped"
    elif getattr(config, "final_logit_softcapping", None):
        reason = "logit soft-capping, which a draft's plain lm_head product does not reproduce"
    if reason is not None:
        raise TargetError(
            expected="a causal language model with a key-value cache",
            found=reason,
            where="target",
            fix="Use another target; see docs/architecture.md for what can be tapped.",
        )


def _final_norm(model: Any) -> Any:
    """The module between the last layer and the head, found by its usual names."""
    body = getattr(model, model.base_model_prefix, model)
    for owner in (body, getattr(body, "decoder", body)):
        for name in _NORMS:
            if hasattr(owner, name):
                return getattr(owner, name)
    raise TargetError(
        expected=f"a final norm named one of {', '.join(_NORMS)}",
        found=f"none in {type(body).__name__}",
        where="target",
        fix="This architecture is not covered by the transformers adapter yet.",
    )
