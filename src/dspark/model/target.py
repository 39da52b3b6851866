"""The target: a config-driven decoder that returns the states a draft is fed with.

``Target`` is the interface every stage uses; ``DecoderTarget`` is our own decoder (GQA, MLA, or a
hybrid of MLA and KDA) and ``dspark.model.hf_target`` adapts any other Hugging Face causal LM to it.
One forward returns the last hidden state AFTER the final norm and the residual streams after the
tapped layers, so capture and decoding read the very same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dspark.config.layers import check_layer_ids
from dspark.config.target import TargetConfig
from dspark.errors import TargetError
from dspark.model.cache import RowCache
from dspark.model.gqa import SHORT, GroupedAttention
from dspark.model.kda import DeltaAttention
from dspark.model.layers import FusedMLP, RMSNorm, Rope, pack_linears, packed_or_plain
from dspark.model.mla import LatentAttention, LatentDims
from dspark.model.moe import ExpertsMLP
from dspark.model.residuals import ResidualMix, TappedStream
from dspark.model.spans import Span
from dspark.model.states import BatchStates, FreshStates, HybridCache, Rows, StateDims

# DeepSeek-V3 builds its two latent norms without passing rms_norm_eps: they keep their default.
LATENT_EPS = 1e-6


def checked_layer_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """``ids`` if they may be tapped (none at all is fine: a target that only answers).

    Raises:
        TargetError: not strictly increasing, or outside ``[0, num_layers - 2]``.
    """
    try:
        if ids:
            check_layer_ids(ids, num_layers)
    except ValueError as error:
        raise TargetError(
            expected=f"tapped layer ids inside [0, {num_layers - 2}], strictly increasing",
            found=f"{list(ids)} ({error})",
            where="target_layer_ids",
            fix="Choose other layers of this target.",
        ) from error
    return ids


@dataclass(frozen=True)
class TargetOutput:
    """``final`` [B, T, H] after the final norm; ``taps`` [B, T, L, H] in ascending layer order."""

    final: Tensor
    taps: Tensor


class Target(Protocol):
    """What stages need from a target. ``cache`` objects are opaque to callers.

    ``supports_ragged``: sequences at different positions can be decoded together. ``recurrent``: it
    keeps states beside rows, through which the padding of a batch would run.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int
    layer_ids: tuple[int, ...]
    supports_ragged: bool
    recurrent: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def final_norm(self) -> nn.Module:
        """The module that :meth:`norm` applies; its input is the last state before the norm."""
        ...

    def new_cache(self, batch: int, capacity: int) -> Any: ...

    def forward(self, ids: Tensor, span: Span, cache: Any | None) -> TargetOutput: ...

    def logits(self, final: Tensor) -> Tensor:
        """lm_head of final-normed states [..., H] -> [..., V], in the states' dtype."""
        ...

    def embedding_weight(self) -> Tensor: ...

    def head_weight(self) -> Tensor: ...

    def norm(self, h: Tensor) -> Tensor:
        """The final norm, for states captured before it."""
        ...


class LatentTargetAttention(nn.Module):
    """Causal MLA of a target layer: its cache part is the latent row itself."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        sizes = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim,
                 config.v_head_dim)  # fmt: skip
        kv_lora, nope, rope, v = (int(s or 0) for s in sizes)
        self.layer = layer
        self.core = LatentAttention(
            LatentDims(config.hidden_size, config.num_attention_heads, config.q_lora_rank, kv_lora,
                       nope, rope, v, LATENT_EPS),
            config.rope_parameters, bias=config.attention_bias,
        )  # fmt: skip
        self.g_proj: nn.Module | None = None
        if config.output_gate:
            self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads * v, bias=False)

    def forward(self, x: Tensor, rotation: Tensor | None, span: Span, cache: Rows | None) -> Tensor:
        fresh = self.core.rows(x, rotation).unsqueeze(2)
        rows: Sequence[Sequence[Tensor]] = [(fresh.transpose(1, 2),)]
        if cache is not None:
            rows = cache.append(self.layer, span, fresh)
        queries = self.core.queries(x, rotation)
        heads = span.over(self._attend, queries, rows).flatten(-2)
        if self.g_proj is not None:
            heads = heads * self.g_proj(x).sigmoid()
        mixed: Tensor = self.core.o_proj(heads)
        return mixed

    def _attend(
        self, queries: Sequence[Tensor], rows: Sequence[Tensor], mask: Tensor | None, causal: bool
    ) -> Tensor:
        latent = rows[0].squeeze(1)
        if queries[0].shape[1] <= SHORT and not causal:
            # Reading latent rows as they lie beats expanding the whole context for few queries.
            return self.core.attend_few(queries, latent, mask)
        return self.core.attend(queries, latent, mask, causal=causal)


def _mixer(config: TargetConfig, layer: int) -> nn.Module:
    """What mixes tokens in ``layer``. Layers with rows and layers with states count apart."""
    recurrent = config.recurrent_layers
    before = sum(i < layer for i in recurrent)
    if layer in recurrent:
        return DeltaAttention(config, before)
    kind = GroupedAttention if config.attention == "gqa" else LatentTargetAttention
    return kind(config, layer - before)


class TargetLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _mixer(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.experts_of(layer)
        self.mlp: nn.Module = (
            FusedMLP(config.hidden_size, config.intermediate_size, config.situ)
            if experts is None
            else ExpertsMLP(config.hidden_size, experts, config.rms_norm_eps, config.situ)
        )
        if config.residual_block is not None:
            self.opens_block = layer % config.residual_block == 0
            self.attention_mix = ResidualMix(config.hidden_size, config.rms_norm_eps)
            self.mlp_mix = ResidualMix(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Tensor | None, span: Span, cache: Rows | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, span, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def mixed(
        self, prefix: Tensor, bank: list[Tensor], rotation: Tensor | None, span: Span, cache: Any
    ) -> Tensor:
        """As :meth:`forward` with attention residuals: the new prefix; ``bank`` may grow."""
        x = self.attention_mix(bank, prefix) if bank else prefix
        if self.opens_block:
            bank.append(prefix)
        mixed: Tensor = self.self_attn(self.input_layernorm(x), rotation, span, cache)
        prefix = mixed if self.opens_block else prefix + mixed
        read = self.post_attention_layernorm(self.mlp_mix(bank, prefix))
        out: Tensor = prefix + self.mlp(read)
        return out


def _with_states(
    dims: StateDims, span: Span, cache: Rows | None, batch: int, device: torch.device
) -> HybridCache:
    if cache is None:
        return HybridCache(None, FreshStates(dims, batch, device))
    assert cache.states is not None, "a cache made for this target"
    return HybridCache(cache, cache.states.begin(span))


class DecoderTarget(nn.Module):
    """Our decoder for GQA, MLA and hybrid targets; implements :class:`Target`.

    ``state_dims`` are the sizes of a hybrid's recurrent states, None for others; ``row_layers`` is
    how many layers cache rows. ``tapped`` chooses the stream of targets with attention residuals
    (``dspark.model.residuals``); others have one only.
    """

    def __init__(
        self,
        config: TargetConfig,
        layer_ids: tuple[int, ...] = (),
        tapped: TappedStream = "prefix_sum",
    ) -> None:
        super().__init__()
        self.config, self.tapped = config, tapped
        if tapped == "mixed" and config.residual_block is None:
            raise TargetError(
                expected="a target with attention residuals, for the mixed stream",
                found="one with a single residual stream",
                where="tapped stream",
                fix="Leave it at prefix_sum.",
            )
        self.layer_ids = checked_layer_ids(layer_ids, config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.residual_block is not None:
            self.final_mix = ResidualMix(config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        rope_dim = config.head_dim if config.attention == "gqa" else config.qk_rope_head_dim
        self.rope = Rope(int(rope_dim or 0), config.rope_parameters) if config.rotary else None
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.row_layers = config.num_hidden_layers - len(config.recurrent_layers)
        self.supports_ragged, self.recurrent = True, config.linear is not None
        self.vocab_size = config.vocab_size
        self.max_context = config.max_position_embeddings
        self._head: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def pack(self, dtype: torch.dtype | None = None) -> int:
        """Prepack linears for CPU inference in ``dtype`` (default: the target's own).

        The head always keeps the target's dtype: bf16 logits of 30 are rounded to 0.125, which
        moves 1 % of greedy tokens. The raw head stays available to the trainer. Returns how many
        linears were packed.
        """
        self._head = self.head_weight()
        for layer in self.layers:
            if isinstance(layer, TargetLayer) and isinstance(
                layer.self_attn, LatentTargetAttention
            ):
                layer.self_attn.core.prepare_serving()
        self.lm_head, head = nn.Identity(), self.lm_head
        packed = pack_linears(self, dtype or self.dtype)
        self.lm_head = packed_or_plain(head, self.dtype) if isinstance(head, nn.Linear) else head
        return packed + (self.lm_head is not head)

    @property
    def state_dims(self) -> StateDims | None:
        linear = self.config.linear
        return None if linear is None else StateDims.of(linear, self.dtype)

    @property
    def row_parts(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of every part that each of ``row_layers`` caches for one token."""
        c = self.config
        if c.attention == "gqa":
            return ((c.num_key_value_heads, c.head_dim),) * 2
        return ((1, int(c.kv_lora_rank or 0) + int(c.qk_rope_head_dim or 0)),)

    def new_cache(self, batch: int, capacity: int) -> RowCache:
        rows = RowCache(self.row_layers, batch, capacity, self.row_parts, self.dtype, self.device)
        if self.state_dims is not None:
            rows.states = BatchStates(self.state_dims, batch, self.device)
        return rows

    def forward(self, ids: Tensor, span: Span, cache: Rows | None = None) -> TargetOutput:
        """ids [B, T] -> final states and taps; rows are written to ``cache`` when given."""
        x: Tensor = self.embed_tokens(ids)
        rotation = None if self.rope is None else self.rope.at(span.positions)
        seen: Rows | HybridCache | None = cache
        if (dims := self.state_dims) is not None:
            seen = _with_states(dims, span, cache, len(ids), self.device)
        taps: list[Tensor] = []
        if self.config.residual_block is not None:
            x = self._through_blocks(x, rotation, span, seen, taps)
        else:
            for i, layer in enumerate(self.layers):
                x = layer(x, rotation, span, seen)
                if i in self.layer_ids:
                    taps.append(x)
        stacked = torch.stack(taps, -2) if taps else x.new_zeros(*x.shape[:-1], 0, x.shape[-1])
        return TargetOutput(self.final_norm(x), stacked)

    def _through_blocks(
        self, prefix: Tensor, rotation: Tensor | None, span: Span, cache: Any, taps: list[Tensor]
    ) -> Tensor:
        """All layers with attention residuals: what the final norm reads."""
        bank: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TargetLayer)
            if i - 1 in self.layer_ids and self.tapped == "mixed":
                taps.append(layer.attention_mix(bank, prefix))
            prefix = layer.mixed(prefix, bank, rotation, span, cache)
            if i in self.layer_ids and self.tapped == "prefix_sum":
                taps.append(prefix)
        out: Tensor = self.final_mix(bank, prefix)
        return out

    def logits(self, final: Tensor) -> Tensor:
        out: Tensor = self.lm_head(final)
        return out

    def norm(self, h: Tensor) -> Tensor:
        out: Tensor = self.final_norm(h)
        return out

    def embedding_weight(self) -> Tensor:
        return self.embed_tokens.weight.detach()

    def head_weight(self) -> Tensor:
        if self._head is not None:
            return self._head
        assert isinstance(self.lm_head, nn.Linear)
        return self.lm_head.weight.detach()
