"""The DSpark draft: a few dense non-causal layers that draft a whole block in one pass.

Context enters once per token: the tapped target states are concatenated, projected and normalised
(``context``), and every layer turns that vector into its own row (``context_rows``): a latent row
(k3) or keys and values (qwen3). Rows are cached, so a decoding step only pays for the
``block_size`` rows ``[anchor, MASK, ...]``.

Flavours differ in the attention module and in three names, nowhere else: parameters are called as
published, so a state dict is a checkpoint.

The same modules serve two layouts: *training* (many blocks of one sequence in windows, see
``dspark.training.anchors``) and *serving* (one block over cached rows). Their equality is the
parity oracle of the test suite: a label shift or a wrong position shows there, not in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig
from dspark.model.gqa import GroupedBlockAttention
from dspark.model.heads import ConfidenceHead, MarkovHead
from dspark.model.layers import RMSNorm, SwiGLU
from dspark.model.mla import LatentAttention, LatentDims
from dspark.model.spans import BlockContext, over_contexts
from dspark.model.weights import DRAFT_NAMES
from dspark.model.windows import Mask


def block_attention(config: DraftConfig) -> LatentAttention | GroupedBlockAttention:
    """The one module in which flavours differ.

    Both make the cached row of a token (``rows``) and attend over rows: ``forward`` for many
    queries, and for a single block over a long context ``attend_few``, between ``queries`` and
    ``project``.
    """
    if isinstance(config, Qwen3DraftConfig):
        return GroupedBlockAttention(config)
    assert isinstance(config, K3DraftConfig)
    dims = LatentDims(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_lora=config.q_lora_rank,
        kv_lora=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        v=config.v_head_dim,
        eps=config.rms_norm_eps,
    )
    return LatentAttention(dims, config.rope_parameters)


class DraftLayer(nn.Module):
    """Pre-norm attention + SwiGLU. Context rows bypass ``input_layernorm``; block rows do not."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = block_attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        context_rows: Tensor,
        mask: Mask | None,
    ) -> Tensor:
        """x [B, Q, H] over ``context_rows`` [B, S, row] and its own rows -> [B, Q, H]."""
        normed = self.input_layernorm(x)
        own = self.self_attn.rows(normed, rotation)
        rows = torch.cat([context_rows.to(own.dtype), own], dim=1)
        return self._behind(x + self.self_attn(normed, rotation, rows, mask))

    def serve(
        self, x: Tensor, rotation: Tensor, contexts: Sequence[BlockContext], layer: int
    ) -> Tensor:
        """Blocks x [R, K, H] over rows of ``layer`` in their ``contexts`` -> [R, K, H]."""
        normed = self.input_layernorm(x)
        own = self.self_attn.rows(normed, rotation)
        queries = self.self_attn.queries(normed, rotation)
        heads = over_contexts(self.self_attn.attend_few, queries, own, contexts, layer)
        return self._behind(x + self.self_attn.project(heads))

    def _behind(self, x: Tensor) -> Tensor:
        """What follows attention."""
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DSparkDraft(nn.Module):
    """A draft of either flavour. State-dict names are exactly the published ones (contract,
    section 3); in code the parts that have two names go by those of the k3 flavour.

    The target's ``lm_head`` is not part of the draft; callers pass its weight where logits are
    needed. ``embed_tokens`` is the target's embedding, frozen, kept for engines that load it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        taps = len(config.target_layer_ids)
        self.names = DRAFT_NAMES[config.flavour]
        self._modules[self.names.context_proj] = nn.Linear(
            taps * config.target_hidden_size, hidden, bias=False
        )
        self._modules[self.names.context_norm] = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self._modules[self.names.final_norm] = RMSNorm(hidden, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_tokens.weight.requires_grad_(False)
        self.markov_head = MarkovHead(
            config.markov_head_type, config.vocab_size, config.markov_rank, hidden
        )
        self.confidence_head = ConfidenceHead(hidden, config.markov_rank)

    @property
    def context_proj(self) -> nn.Module:
        found = self._modules[self.names.context_proj]
        assert found is not None
        return found

    @property
    def context_norm(self) -> RMSNorm:
        return self._norm(self.names.context_norm)

    @property
    def final_norm(self) -> RMSNorm:
        return self._norm(self.names.final_norm)

    def _norm(self, name: str) -> RMSNorm:
        found = self._modules[name]
        assert isinstance(found, RMSNorm)
        return found

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def rotation(self, positions: Tensor) -> Tensor:
        """Rotations [..., rope/2] of integer ``positions`` [...]; the same for every layer."""
        return self.draft_layers[0].self_attn.rope.at(positions)

    def context(self, taps: Tensor) -> Tensor:
        """Tapped states [B, S, L, H] in ascending layer order -> context vectors [B, S, H]."""
        out: Tensor = self.context_norm(self.context_proj(taps.flatten(-2)))
        return out

    def context_rows(self, context: Tensor, positions: Tensor) -> list[Tensor]:
        """One tensor of rows [B, S, row] per layer for tokens at ``positions`` [B, S]."""
        rotation = self.rotation(positions)
        return [layer.self_attn.rows(context, rotation) for layer in self.draft_layers]

    def backbone(
        self,
        block_ids: Tensor,
        positions: Tensor,
        context_rows: list[Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """Block ids [B, Q] at ``positions`` [B, Q] -> final-normed hidden states [B, Q, H].

        ``mask`` [B, 1, Q, S + Q] boolean, or None when every block row sees every row given.
        """
        x, rotation = self._embedded(block_ids), self.rotation(positions)
        for layer, rows in zip(self.draft_layers, context_rows, strict=True):
            x = layer(x, rotation, rows, mask)
        out: Tensor = self.final_norm(x)
        return out

    def serve(
        self, block_ids: Tensor, positions: Tensor, contexts: Sequence[BlockContext]
    ) -> Tensor:
        """As :meth:`backbone`, for one block [K] of each request over long contexts: block ids and
        ``positions`` [R, K], in the order of their ``contexts``. No gradients."""
        x, rotation = self._embedded(block_ids), self.rotation(positions)
        for number, layer in enumerate(self.draft_layers):
            x = layer.serve(x, rotation, contexts, number)
        out: Tensor = self.final_norm(x)
        return out

    def _embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed_tokens(ids).to(self.context_norm.weight.dtype)
        return out

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Anchor token ids [B] -> block inputs [B, block_size] = [anchor, MASK, ..., MASK]."""
        ids = anchors.new_full((*anchors.shape, self.config.block_size), self.config.mask_token_id)
        ids[..., 0] = anchors
        return ids
