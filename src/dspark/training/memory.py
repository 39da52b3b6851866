"""What one trainer rank holds, in bytes, known without running anything.

Weights, gradients and moments follow from counts. Activations follow from the code itself: the
training layout is run once on tensors without storage, and what autograd keeps for the backward
pass is added up, so the number is right for any size, flavour and setting. The loss is chunked and
its share is bounded by ``loss.chunk_rows``.

Checked against measured peaks in ``tests/training/test_memory_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dspark.config.architecture import DraftConfig, K3DraftConfig
from dspark.config.recipe import TrainSection
from dspark.model.draft import DSparkDraft
from dspark.model.windows import Mask, Window, Windows
from dspark.training.anchors import bounds_of
from dspark.training.loss import rows_at_once
from dspark.training.step import layer_step

LOSS_COPIES = 3  # [chunk, V] tensors alive at once: logits, p and what parts of them need
FP32, BF16 = 4, 2


@dataclass(frozen=True)
class Load:
    """One micro-batch: ``batch`` sequences of ``length`` tokens with ``anchors`` blocks each.

    ``support`` is the draft vocabulary, the whole one when None; ``state_width`` bytes per element
    of taps and final states.
    """

    batch: int
    length: int
    anchors: int
    support: int | None = None
    state_width: int = BF16


@dataclass(frozen=True)
class Counts:
    """Numbers of a draft: trainable, of its largest layer, outside of layers, frozen."""

    trainable: int
    layer: int
    root: int
    frozen: int


def counts_of(config: DraftConfig) -> Counts:
    """Counted on the module itself, without storage."""
    with torch.device("meta"):
        draft = DSparkDraft(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in draft.draft_layers]
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in draft.parameters() if not p.requires_grad)
    return Counts(trained, max(layers), trained - sum(layers), frozen)


@contextmanager
def _kept(without: set[int]) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd keeps inside the block, by storage."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in without:
            found[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # a freed storage's number would be given out again
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _draft_in(config: DraftConfig, dtype: torch.dtype) -> DSparkDraft:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return DSparkDraft(config)
    finally:
        torch.set_default_dtype(usual)


def _spread(load: Load, block: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Windows of anchors that are spread evenly over the sequence."""
    last = max(load.anchors - 1, 1)
    anchors = [i * (load.length - 1) // last for i in range(load.anchors)]
    return bounds_of(anchors, block)


def _mask(load: Load, block: int, fused: bool) -> Mask:
    """The mask as training has it, without content: in windows, or whole for fused kernels."""
    rows = load.anchors * block
    if fused:
        return torch.empty(load.batch, 1, rows, load.length + rows, dtype=torch.bool)
    parts = []
    for (start, stop), (low, high) in _spread(load, block):
        mask = torch.empty(load.batch, 1, stop - start, high - low, dtype=torch.bool)
        parts.append(Window((start, stop), (low, high), mask))
    return Windows(load.length, block, tuple(parts))


def _mask_bytes(load: Load, block: int, fused: bool) -> int:
    with torch.device("meta"):
        mask = _mask(load, block, fused)
    parts = [p.mask for p in mask.parts] if isinstance(mask, Windows) else [mask]
    return sum(part.numel() for part in parts)


def activation_bytes(
    config: DraftConfig,
    section: TrainSection,
    load: Load,
    *,
    sharded: bool = False,
    fused: bool = False,
) -> tuple[int, int, int]:
    """(kept for the backward pass by all layers, what one layer has inside, its largest tensor).

    With ``checkpoint_activations`` only a layer's input is kept, and its inside is there again
    while it goes backward. ``fused``: attention kernels that keep no probabilities also
    for values narrower than keys, as CUDA's do and a CPU's do not.
    """
    block = config.block_size
    if fused and isinstance(config, K3DraftConfig):
        # The CPU's kernel is of that kind when both are equally wide: an upper bound.
        wide = config.qk_nope_head_dim + config.qk_rope_head_dim
        config = config.model_copy(update={"v_head_dim": wide})
    half = section.precision == "bfloat16"
    with FakeTensorMode(allow_non_fake_inputs=True):
        draft = _draft_in(config, torch.bfloat16 if sharded and half else torch.float32)
        dtype = draft.context_norm.weight.dtype
        rows = load.anchors * block
        x = torch.empty(load.batch, rows, config.hidden_size, dtype=dtype, requires_grad=True)
        taps = torch.empty(
            load.batch, load.length, len(config.target_layer_ids), config.target_hidden_size
        )
        mask = _mask(load, block, fused)
        weights = {p.untyped_storage()._cdata for p in draft.parameters()}
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        given = taps.to(dtype)  # counted with the micro-batch
        with autocast, _kept(weights | {given.untyped_storage()._cdata}) as around:
            context = draft.context(given)
        rotation = draft.rotation(torch.zeros(load.batch, rows, dtype=torch.long))
        context_rotation = draft.rotation(torch.zeros(load.batch, load.length, dtype=torch.long))
        held = weights | set(around)
        masks = [p.mask for p in mask.parts] if isinstance(mask, Windows) else [mask]
        held |= {t.untyped_storage()._cdata for t in (*masks, x)}
        with autocast, _kept(held) as layer:
            out = layer_step(draft.draft_layers[0], x, rotation, context, context_rotation, mask)
        stream = out.numel() * out.element_size()
    one = sum(layer.values())
    layers = config.num_hidden_layers
    kept = stream * layers if section.checkpoint_activations else (one + stream) * layers
    return kept + sum(around.values()), one, max(layer.values())


def rank_memory(
    config: DraftConfig,
    section: TrainSection,
    load: Load,
    *,
    ranks: int = 1,
    sharded: bool = False,
    fused: bool = False,
) -> dict[str, int]:
    """Bytes by what they are for; their sum is the peak of a step."""
    counts, vocabulary = counts_of(config), config.vocab_size
    hidden, block = config.hidden_size, config.block_size
    support = load.support or vocabulary
    per_rank = -(-counts.trainable // ranks)
    half = section.precision == "bfloat16"
    gathered = 0
    if sharded:
        # Weights outside of layers stay gathered; of layers the current one and the next.
        gathered = (counts.root + 2 * counts.layer) * (BF16 if half else FP32)
        # Gradients of a window are kept whole until its last micro-batch reduces them.
        gathered += counts.trainable * FP32 if section.accumulate > ranks else 0
    kept, one, largest = activation_bytes(config, section, load, sharded=sharded, fused=fused)
    rows = load.batch * load.anchors * block
    slot = rows * hidden
    taps = load.batch * load.length * len(config.target_layer_ids) * config.target_hidden_size
    finals = load.batch * load.length * hidden
    blocks = (taps + finals) * load.state_width
    blocks += taps * FP32 if load.state_width != FP32 and not (sharded and half) else 0
    blocks += _mask_bytes(load, block, fused)
    chunk = min(rows, rows_at_once(section.loss.chunk_rows, support, "cuda" if fused else "cpu"))
    # Rows of h and t, the gradient of h; Markov rows and the gradient of W2.
    loss = 3 * slot * FP32 + 2 * rows * config.markov_rank * FP32
    loss += 2 * support * config.markov_rank * FP32
    # The loss is at its largest before any layer goes backward, which itself holds the gradients
    # of its largest tensor going in and coming out.
    layer = (one if section.checkpoint_activations else 0) + 2 * largest
    loss += max(LOSS_COPIES * chunk * support * FP32, layer)
    gradients = per_rank * FP32
    if section.accumulate <= ranks:
        # The only micro-batch of a step: gradients come as activations go.
        gradients = max(0, gradients - kept - loss)
    heads = vocabulary * hidden * FP32 + (support * hidden * FP32 if load.support else 0)
    return {
        "master weights": per_rank * FP32,
        "gradients": gradients,
        "optimiser": per_rank * 2 * FP32,
        "average": per_rank * FP32 if section.ema is not None else 0,
        "gathered weights": gathered,
        "embedding and head": counts.frozen * FP32 + heads,
        "micro-batch": blocks,
        "activations": kept,
        "loss": loss,
    }


def total(parts: dict[str, Any]) -> int:
    return int(sum(parts.values()))
