"""Any other Hugging Face causal language model as a target: slower than ours, the same interface.

Nothing here is a list of known families. What the adapter needs is looked up by role (decoder
layers, final norm, embedding, head) and then *measured* once on five tokens: the tapped states are
transformers' own ``hidden_states``, the final norm and the head reproduce its logits, and running
two tokens, rolling back and running them again gives the same states. A model that fails any of
this is refused with the reason instead of feeding a draft with the wrong tensor.

Rolling back needs a cache that holds every token's keys and values. Recurrent and linear-attention
states forget what they were, so those models are refused. Sliding windows are kept as whole rows
(the mask hides what is out of the window), which costs memory and stays exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config.layers import to_convention
from dspark.errors import DecodingError, TargetError
from dspark.model.spans import Span
from dspark.model.target import TargetOutput, checked_layer_ids

NORM_NAMES = ("norm", "final_layer_norm", "final_layernorm", "final_norm", "ln_f", "norm_f")
KEYED_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def _refusal(
    found: str, expected: str = "a causal language model whose states can be used"
) -> TargetError:
    return TargetError(
        expected=expected,
        found=found,
        where="transformers adapter",
        fix="Use a target with ordinary attention in every layer and a plain lm_head.",
    )


class HFCache:
    """Keys and values of one batch in a transformers cache; rolling back crops it."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.inner = _empty_cache()

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self.inner.get_seq_length())

    def begin(self, start: int, reach: int) -> Any:
        """Forget everything from ``start`` on; return the cache to run tokens start..reach-1."""
        if start > self.length or reach > self.capacity:
            raise DecodingError(
                expected=f"a forward that starts at token {self.length} or earlier and reaches at "
                f"most token {self.capacity}",
                found=f"one from token {start} to {reach}",
                where="transformers cache",
                fix="Run tokens in order; raise the capacity or clamp the request's length.",
            )
        if start == 0:
            self.inner = _empty_cache()
        elif start < self.length:
            self.inner.crop(start - self.length)
        return self.inner

    def seed(self, prefix: HFCache, length: int) -> None:
        """Start every batch row with the first ``length`` tokens of ``prefix`` (batch 1)."""
        self.inner = _empty_cache()
        for index, layer in enumerate(prefix.inner.layers):
            keys, values = (
                rows[:1, :, :length].expand(self.batch, -1, -1, -1)
                for rows in (layer.keys, layer.values)
            )
            self.inner.update(keys, values, index)


class HFTarget:
    """Adapter of a transformers causal LM; implements :class:`dspark.model.target.Target`.

    Raises:
        TargetError: the architecture's states cannot be tapped or rolled back; says why.
    """

    supports_ragged = False
    recurrent = False  # as far as is seen from outside: sequences run one by one

    def __init__(self, model: Any, layer_ids: tuple[int, ...] = ()) -> None:
        config = model.config.get_text_config()
        _refuse_uncovered(model, config)
        self.model = model.eval()
        self.num_layers = int(config.num_hidden_layers)
        self.layer_ids = checked_layer_ids(layer_ids, self.num_layers)
        self.max_context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self._body = model.get_decoder()
        self._layers = _decoder_layers(self._body, self.num_layers)
        self.final_norm = _final_norm(self._body)
        self._head = _plain_head(model)
        self._cache_argument = _cache_argument(self._body)
        self.vocab_size, self.hidden_size = self._head.weight.shape
        if model.get_input_embeddings().weight.shape != self._head.weight.shape:
            raise _refusal("an embedding whose shape differs from the head's")
        self._probe()

    @property
    def device(self) -> torch.device:
        return self.embedding_weight().device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight().dtype

    def new_cache(self, batch: int, capacity: int) -> HFCache:
        return HFCache(batch, capacity)

    @torch.no_grad()
    def forward(self, ids: Tensor, span: Span, cache: HFCache | None = None) -> TargetOutput:
        """ids [B, T] -> final states and taps. All sequences continue at the same position.

        Raises:
            TargetError: a batch whose sequences continue at different positions.
            DecodingError: a position without its predecessors, or beyond the cache's capacity.
        """
        start = _common_start(span)
        if cache is None and start != 0:
            raise DecodingError(
                expected="a cache for a forward that continues a sequence",
                found=f"none, at token {start}",
                where="transformers adapter",
                fix="Pass the cache that holds the tokens before.",
            )
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options[self._cache_argument] = cache.begin(start, start + ids.shape[1])
        with self._tapped(self.layer_ids) as taps:
            final: Tensor = self._body(input_ids=ids, **options).last_hidden_state
        shape = (*final.shape[:-1], 0, final.shape[-1])
        return TargetOutput(final, torch.stack(taps, -2) if taps else final.new_zeros(shape))

    @contextmanager
    def _tapped(self, layer_ids: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """Collects the outputs of ``layer_ids``. Hooks live for one forward only, because targets
        with other taps may share the model."""
        states: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        hooks = [self._layers[i].register_forward_hook(keep) for i in layer_ids]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, final: Tensor) -> Tensor:
        out: Tensor = self._head(final)
        return out

    def norm(self, h: Tensor) -> Tensor:
        out: Tensor = self.final_norm(h)
        return out

    def embedding_weight(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    def head_weight(self) -> Tensor:
        return self._head.weight.detach()

    @torch.no_grad()
    def _probe(self) -> None:
        """Measure on five tokens what the lookups by name only suggest."""
        ids = (torch.arange(1, 6, device=self.device) % self.vocab_size).unsqueeze(0)
        everything = (*self.layer_ids, self.num_layers - 1)
        try:
            with self._tapped(everything) as states:
                out = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            golden = out.hidden_states
            cache = self.new_cache(1, 5)
            self.forward(ids[:, :3], Span.at(0, 3, 1, self.device), cache)
            span = Span.at(3, 2, 1, self.device)
            first = self.forward(ids[:, 3:], span, cache).final
            again = self.forward(ids[:, 3:], span, cache).final
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise _refusal(f"{type(error).__name__} on a first forward: {error}") from error
        if golden is None or len(golden) != self.num_layers + 1 or len(states) != len(everything):
            raise _refusal("layers that transformers does not report as hidden_states")
        numbers = to_convention(self.layer_ids, "hf_hidden_states")
        for i, number, state in zip(self.layer_ids, numbers, states, strict=False):
            if not torch.equal(state, golden[number]):
                raise _refusal(f"an output of layer {i} that is not hidden_states[{number}]")
        if not _same(self.norm(states[-1]), golden[-1]):
            raise _refusal("a final norm that does not give the last hidden state")
        if not _same(self.logits(golden[-1]), out.logits):
            raise _refusal("logits that are scaled or capped after the lm_head")
        if not _same(first, golden[-1][:, 3:]) or not _same(again, first):
            raise _refusal("a cache whose continuation or rollback changes the states")


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to what another order of summation does in this dtype (relative norm)."""
    if a.shape != b.shape:
        return False
    tolerance = 1e-4 if b.dtype == torch.float32 else 5e-2
    return bool((a.float() - b.float()).norm() <= tolerance * b.float().norm())


def _empty_cache() -> Any:
    from transformers import DynamicCache

    # Without a config every layer keeps whole rows, those of sliding windows too: rows dropped
    # behind a window could not come back after a rollback.
    return DynamicCache()


def _common_start(span: Span) -> int:
    if span.start is not None:
        return span.start
    starts = span.positions[:, 0]
    if bool((starts != starts[0]).any()):
        raise TargetError(
            expected="a batch whose sequences all continue at one position",
            found=f"positions from {int(starts.min())} to {int(starts.max())}",
            where="transformers adapter",
            fix="Run sequences of different lengths one by one (supports_ragged is False).",
        )
    return int(starts[0])


def _refuse_uncovered(model: Any, config: Any) -> None:
    kind = str(getattr(config, "model_type", type(model).__name__))
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(f"{kind}, an encoder-decoder: its states are not one causal stream")
    if getattr(model, "_is_stateful", False) or getattr(config, "linear_attn_config", None):
        raise _refusal(f"{kind}, which carries a recurrent state that cannot be rolled back")
    others = set(getattr(config, "layer_types", None) or ()) - KEYED_ATTENTION
    if others:
        raise _refusal(f"{kind} with layers of type {', '.join(sorted(others))}, whose cache "
                       "cannot be rolled back by cropping keys and values")  # fmt: skip
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise _refusal(f"{kind}, whose layers share keys and values")


def _decoder_layers(body: Any, count: int) -> nn.ModuleList:
    lists = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise _refusal(f"{len(lists)} lists of {count} layers in {type(body).__name__}")
    return lists[0]


def _final_norm(body: Any) -> nn.Module:
    found = [m for m in (getattr(body, name, None) for name in NORM_NAMES) if m is not None]
    if len(found) != 1 or not isinstance(found[0], nn.Module):
        raise _refusal(
            f"{len(found)} of them in {type(body).__name__}",
            f"one final norm, named {', '.join(NORM_NAMES)}",
        )
    return found[0]


def _plain_head(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise _refusal(f"a head of type {type(head).__name__}", "a linear lm_head")
    if head.bias is not None and bool(head.bias.any()):
        raise _refusal("an lm_head with a bias", "an lm_head that is one product, as drafts use it")
    return head


def _cache_argument(body: Any) -> str:
    """Newer transformers call it ``cache``, older ones ``past_key_values``."""
    for name in ("cache", "past_key_values"):
        if name in inspect.signature(body.forward).parameters:
            return name
    raise _refusal(f"{type(body).__name__}, which takes no key-value cache")
