"""Initial weights of a new draft.

Small normals for projections (0.02, as the target family), zeros where a zero start is the neutral
choice: the outputs of every residual branch start small, the confidence head starts undecided, and
``final_norm`` starts at :data:`FINAL_NORM_GAIN` so that base logits through a tied, trained lm_head
start near uniform instead of at a cross entropy of 48.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dspark.model.draft import DSparkDraft

STD = 0.02
FINAL_NORM_GAIN = 0.3


def initialise(draft: DSparkDraft, embedding: Tensor | None, seed: int) -> DSparkDraft:
    """Fill every parameter; ``embedding`` [V, H] is copied bit-exactly from the target."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.weight.shape[1] ** -0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding) and module is not draft.embed_tokens:
                module.weight.normal_(0, STD, generator=generator)
        for layer in draft.draft_layers:
            scale = 1 / math.sqrt(2 * len(draft.layers))
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
        draft.final_norm.weight.fill_(FINAL_NORM_GAIN)
        draft.markov_head.markov_w2.weight.normal_(0, STD, generator=generator)
        draft.confidence_head.proj.weight.zero_()
        if embedding is not None:
            draft.embed_tokens.weight.copy_(embedding)
        else:
            draft.embed_tokens.weight.normal_(0, STD, generator=generator)
    return draft
