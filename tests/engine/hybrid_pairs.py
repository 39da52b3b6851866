"""A tiny random hybrid target with a draft that is often right, as engines of every kind.

The draft is a random one whose Markov head was set to what the target says after single tokens, so
some of its drafts are accepted and many are not: both matter here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.config.architecture import K3DraftConfig
from dspark.config.engine import EngineOptions
from dspark.engine.core import EngineCore
from dspark.engine.drafter import Drafter
from dspark.engine.memory import bytes_per_token, state_bytes
from dspark.model.draft import DSparkDraft
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from model.hybrid_models import kimi_model
from model.tiny_targets import COVERED, decoder_of, transformers_model

BLOCK, SIZE, VOCAB = 4, 4, 7  # few tokens: a draft is often right by chance
TAPS = (0, 1, 3)


def made_draft(target: DecoderTarget) -> DSparkDraft:
    generator = torch.Generator().manual_seed(5)
    draft = DSparkDraft(
        K3DraftConfig(
            hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCAB, max_position_embeddings=128, target_layer_ids=TAPS,
            target_num_hidden_layers=5, target_hidden_size=32, mask_token_id=VOCAB - 1,
            markov_rank=VOCAB, block_size=BLOCK, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
            qk_rope_head_dim=4, v_head_dim=4,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.5 * weight.shape[-1] ** -0.5, generator=generator)
        out = target.forward(torch.arange(VOCAB).unsqueeze(1), Span.alone(VOCAB, 1, target.device))
        left, scale, right = torch.linalg.svd(target.logits(out.final[:, 0]))  # [V, V]
        draft.markov_head.markov_w1.weight.copy_(left * scale * 30)
        draft.markov_head.markov_w2.weight.copy_(right.T)
    return draft


@dataclass
class HybridPair:
    target: DecoderTarget
    drafter: Drafter

    @staticmethod
    def of(name: str = "kimi-mixed") -> HybridPair:
        model = kimi_model(name, vocab_size=VOCAB)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(0.12)  # the last token matters most
        target = decoder_of(model, TAPS)
        return HybridPair(target, Drafter(made_draft(target), target.head_weight(), pack=False))

    @staticmethod
    def latent() -> HybridPair:
        """The same with a target that has no recurrent layers."""
        fields = {**COVERED["mla"][1], "num_hidden_layers": 5, "first_k_dense_replace": 5}
        target = decoder_of(transformers_model("deepseek_v3", **fields, vocab_size=VOCAB), TAPS)
        with torch.no_grad():
            for layer in target.layers:
                layer.self_attn.core.o_proj.weight.mul_(0.12)
        return HybridPair(target, Drafter(made_draft(target), target.head_weight(), pack=False))

    def engine(
        self,
        *,
        draft: bool = True,
        pages: int | None = None,
        identity: str = "pair",
        **options: Any,
    ) -> EngineCore:
        """``pages`` fixes the cache's size exactly."""
        drafter = self.drafter if draft else None
        options = {"page_size": SIZE, "max_requests": 4, "state_snapshots": 6, **options}
        if pages is not None:
            chosen = EngineOptions(**options)
            per_page = bytes_per_token(self.target, drafter) * chosen.page_size
            needed = state_bytes(self.target, chosen) + (pages + 0.5) * per_page
            options["cache_gib"] = needed / 2**30
        return EngineCore(
            self.target, drafter, frozenset(), options=EngineOptions(**options), identity=identity
        )


def settled_states(core: EngineCore) -> None:
    """Every running request's states, and every kept one, are those of one plain forward."""
    hybrid = core.runner._hybrid
    assert hybrid is not None
    for request, slot in hybrid._slots.items():
        check_state(core, request.tokens(0, hybrid._at[request]), slot)


def check_state(core: EngineCore, text: list[int], slot: int) -> None:
    """``slot`` holds the states behind ``text``."""
    target, states = core.target, core.runner._hybrid.states
    if not text:
        return
    cache = target.new_cache(1, len(text))
    with torch.inference_mode():
        target.forward(torch.tensor([text]), Span.at(0, len(text), 1, target.device), cache)
    for found, wanted in (
        (states.matrices[:, slot], cache.states.matrices[:, 0]),
        (states.inputs[:, slot], cache.states.inputs[:, 0]),
    ):
        scale = float(wanted.abs().max())
        gap = float((found - wanted).abs().max()) / scale
        assert gap <= 1e-4, (len(text), slot, gap)
