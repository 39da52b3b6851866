"""Initial weights of a new draft.

Small normals for projections (0.02 for embeddings, 1 / sqrt(inputs) for linears), zeros where a
zero start is the neutral choice: the outputs of every residual branch start small, the confidence
head starts undecided, and the final norm starts at :data:`FINAL_NORM_GAIN` so that base logits
through a tied, trained lm_head start near uniform instead of at a cross entropy of 48.

Every tensor has its own random stream, seeded by the seed and its name, and is drawn in pieces of a
fixed size. So a draft of any size can be written tensor by tensor without ever being in memory
(``dspark init``), and its numbers are those that training starts from with the same seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.model.draft import DSparkDraft
from dspark.model.weights import DRAFT_NAMES

STD = 0.02
FINAL_NORM_GAIN = 0.3
PIECE = 1 << 22
"""Numbers drawn at once. Part of what a seed means: another value gives other weights."""

EMBEDDINGS = ("embed_tokens.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
FINAL_NORMS = frozenset(f"{names.final_norm}.weight" for names in DRAFT_NAMES.values())


@dataclass(frozen=True)
class Start:
    """What a tensor starts as: normals of deviation ``std``, or ``constant`` all over."""

    std: float = 0.0
    constant: float = 0.0


def start_of(name: str, shape: tuple[int, ...], layers: int) -> Start:
    """The start of the tensor called ``name`` in a draft of ``layers`` layers."""
    if name in FINAL_NORMS:
        return Start(constant=FINAL_NORM_GAIN)
    if name in EMBEDDINGS:
        return Start(std=STD)
    if name.endswith(".bias") or name.startswith("confidence_head."):
        return Start()
    if len(shape) == 1:
        return Start(constant=1.0)
    std = shape[1] ** -0.5
    branch_ends = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))
    return Start(std=std / math.sqrt(2 * layers) if branch_ends else std)


def start_pieces(name: str, shape: tuple[int, ...], layers: int, seed: int) -> Iterator[Tensor]:
    """The tensor's numbers in fp32, flat, at most :data:`PIECE` at a time."""
    start = start_of(name, shape, layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    left = math.prod(shape)
    while left:
        piece = torch.empty(min(PIECE, left), device="cpu")
        if start.std:
            piece.normal_(0, start.std, generator=generator)
        else:
            piece.fill_(start.constant)
        left -= len(piece)
        yield piece


@torch.no_grad()
def initialise(draft: DSparkDraft, embedding: Tensor | None, seed: int) -> DSparkDraft:
    """Fill every parameter; ``embedding`` [V, H] is copied bit-exactly from the target."""
    for name, tensor in draft.state_dict().items():
        at = 0
        for piece in start_pieces(name, tuple(tensor.shape), len(draft.layers), seed):
            tensor.view(-1)[at : at + len(piece)] = piece
            at += len(piece)
    if embedding is not None:
        draft.embed_tokens.weight.copy_(embedding)
    return draft
