"""A context path that predicts before the first step: ridge regression put into the first layer.

The tapped states of the token before the anchor already say much of what the target will do next:
on a narrow workload a linear map of them explains 88 % of the variance of its next final state, and
more than half of the one seven tokens on. A new draft has to find that map *and* learn to look at
the right row first, which costs most of a short training run. Here both are computed.

How the first layer's own weights say it (K3 flavour):

1. ``context_proj`` maps taps to the leading directions of what ridge regression predicts, plus one
   direction that is constant, because there are no biases.
2. The constant makes the rope part of every context row the same vector, and a constant found in
   the block's embeddings does so for the queries; rotated by ``j`` positions in head ``j - 1``,
   that head looks exactly ``j`` tokens back. Rows of the block have nothing there.
3. The row ``j`` tokens back predicts the state that the query's slot needs, ``j`` tokens on from
   it; head ``j - 1`` carries that prediction in its value and output matrices. So every slot sums
   the predictions of all rows that are near enough, whichever slot it is.

Everything stays trainable. Source: our own; ``benchmarks/levers.py`` measures what it is worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config.architecture import K3DraftConfig
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.mla import LatentAttention

MAX_POSITIONS = 16_000
MAX_INPUTS = 8192  # taps times hidden size: the Gram matrix is this squared
SHARPNESS = 24.0  # attention logit of a row at exactly the distance a head looks back
CONSTANT_GAIN = 8.0  # the constant's share in the query latent before its norm
SPREAD = 0.3  # of the untouched context directions, against 1 for the fitted ones
PENALTY = 1e-4


@dataclass(frozen=True)
class ContextSample:
    """N answer positions t: ``taps`` [N, L*H] there, ``finals`` [N, K, H] at t+1 .. t+K without
    their mean, ``tokens`` [N] the ids at t+1."""

    taps: Tensor
    finals: Tensor
    tokens: Tensor


def warm_start_context(draft: DSparkDraft, records: Sequence[HiddenRecord], seed: int) -> None:
    """Overwrite ``context_proj`` and the first layer's attention; about 10 s on two cores.

    Raises:
        TrainingError: too few answer positions, or sizes the construction does not fit.
    """
    config = draft.config
    assert isinstance(config, K3DraftConfig)  # the recipe refuses other flavours
    generator = torch.Generator().manual_seed(seed)
    sample = context_sample(records, config.block_size, generator)
    _require_fit(config, sample)
    attention = draft.draft_layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    with torch.no_grad():
        projection = _projection(sample, config.hidden_size, config.kv_lora_rank, generator)
        weight = draft.context_proj.weight
        assert isinstance(weight, Tensor)
        weight.copy_(projection)
        taps = len(config.target_layer_ids)
        context = draft.context(sample.taps.unflatten(-1, (taps, -1)))
        _look_back(attention, draft, context, sample.tokens)
        _carry_predictions(attention, context, sample.finals)
        # Predictions are of final states, whose scale the head knows: no flat start is needed.
        draft.final_norm.weight.fill_(1.0)


def context_sample(
    records: Sequence[HiddenRecord], leads: int, generator: torch.Generator
) -> ContextSample:
    """Positions from the one before each answer on, at most :data:`MAX_POSITIONS`."""
    taps, finals, tokens = [], [], []
    for record in records:
        first = int(record.loss_mask.bool().long().argmax())
        # Position 0 is left out: its residual stream is a thousand times larger (attention sink).
        at = torch.arange(max(first - 1, 1), len(record) - leads)
        taps.append(record.taps[at].flatten(1))
        finals.append(torch.stack([record.final[at + 1 + k] for k in range(leads)], 1))
        tokens.append(record.ids[at + 1].long())
    order = torch.randperm(sum(len(t) for t in tokens), generator=generator)[:MAX_POSITIONS]
    ahead = torch.cat(finals)[order].float()
    return ContextSample(
        torch.cat(taps)[order].float(), ahead - ahead.mean(0), torch.cat(tokens)[order]
    )


def _require_fit(config: K3DraftConfig, sample: ContextSample) -> None:
    need = config.kv_lora_rank
    faults = {
        f"at least {need} answer positions with a whole block behind them": len(sample.tokens)
        >= need,
        f"at most {MAX_INPUTS} tapped elements a token": sample.taps.shape[1] <= MAX_INPUTS,
        "a kv_lora_rank below hidden_size": need < config.hidden_size,
    }
    for expected, holds in faults.items():
        if not holds:
            raise TrainingError(
                expected=expected,
                found=f"{len(sample.tokens)} positions, {sample.taps.shape[1]} elements, "
                f"kv_lora_rank {need}, hidden_size {config.hidden_size}",
                where="train.warm_start.context",
                fix="Set it to false, or give the run more answers.",
            )


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Weights [D, O] minimising |x w - y|^2 + penalty * mean(diag(x'x)) * |w|^2; no intercept."""
    gram = x.T @ x
    gram.diagonal().add_(penalty * gram.diagonal().mean())
    weights: Tensor = torch.linalg.solve(gram, x.T @ y)
    return weights


def _projection(
    sample: ContextSample, hidden: int, rank: int, generator: torch.Generator
) -> Tensor:
    """``context_proj`` [H, L*H]: ``rank`` predictive directions, the constant, random ones."""
    spread = sample.taps.std(0) + 1e-6
    x = sample.taps / spread
    targets = torch.cat([sample.finals.flatten(1), x.new_ones(len(x), 1)], 1)
    fitted = ridge(x, targets, PENALTY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        leading = torch.svd_lowrank(x @ fitted[:, :-1], q=min(rank + 8, *x.shape), niter=2)[2]
    predictive = (fitted[:, :-1] @ leading[:, :rank]).T
    # Between raw and whitened: weak directions count, without drowning the strong ones.
    size = (x @ predictive.T).square().mean(0).sqrt().clamp_min(1e-12)
    predictive /= size.sqrt().unsqueeze(1) * size.square().mean().sqrt().sqrt()
    rest = torch.randn(hidden - len(predictive) - 1, x.shape[1], generator=generator)
    rest *= SPREAD * x.shape[1] ** -0.5
    return torch.cat([predictive, fitted[:, -1:].T, rest]) / spread


def _look_back(
    attention: LatentAttention, draft: DSparkDraft, context: Tensor, tokens: Tensor
) -> None:
    """Head ``j - 1`` attends to the context row ``j`` positions before the query."""
    d = attention.dims
    hidden = context.shape[-1]
    embedding = draft.embed_tokens.weight.float()
    anchors = F.rms_norm(embedding[tokens], (hidden,))
    mask = F.rms_norm(embedding[draft.config.mask_token_id], (hidden,)).expand_as(anchors)
    block = torch.cat([anchors, mask])
    # In keys: 1 for context rows, 0 for the block's own. In queries: 1 for every block row.
    wanted = torch.cat([context.new_ones(len(context), 1), context.new_zeros(len(block), 1)])
    key = ridge(torch.cat([context, block]), wanted, 1e-3).squeeze(1)
    query = ridge(block, context.new_ones(len(block), 1), 1e-3).squeeze(1)
    amplitude = math.sqrt(SHARPNESS / attention.scale / (d.rope / 2))
    attention.kv_a_proj_with_mqa.weight[d.kv_lora :] = 0
    attention.kv_a_proj_with_mqa.weight[d.kv_lora :: 2] = key * amplitude
    attention.q_a_proj.weight[0] = query * CONSTANT_GAIN
    latent = attention.q_a_layernorm(attention.q_a_proj(block))[:, 0].mean()
    rows = attention.q_b_proj.weight.unflatten(0, (d.heads, d.nope + d.rope))[:, d.nope :]
    distances = torch.arange(1, d.heads + 1)
    turned = attention.rope.at(-distances).to(rows.device) * (amplitude / latent)
    rows[:] = 0
    rows[:, :, 0] = torch.view_as_real(turned).flatten(1)
    # The position-free part of the scores starts small: where to look is decided by distance.
    up = attention.kv_b_proj.weight.unflatten(0, (d.heads, d.nope + d.v))
    up[:, : d.nope] *= 0.1


def _carry_predictions(attention: LatentAttention, context: Tensor, finals: Tensor) -> None:
    """Head ``j - 1`` turns a row into the final state ``j`` tokens on, through its ``v`` values."""
    d = attention.dims
    attention.kv_a_proj_with_mqa.weight[: d.kv_lora] = torch.eye(d.kv_lora, d.hidden)
    latent = attention.kv_a_layernorm(context[:, : d.kv_lora])
    up = attention.kv_b_proj.weight.unflatten(0, (d.heads, d.nope + d.v))
    out = attention.o_proj.weight.unflatten(1, (d.heads, d.v))
    for head in range(min(d.heads, finals.shape[1])):
        left, size, right = torch.linalg.svd(
            ridge(latent, finals[:, head], 1e-3), full_matrices=False
        )
        root = size[: d.v].sqrt()
        up[head, d.nope : d.nope + len(root)] = (left[:, : d.v] * root).T
        out[:, head, : len(root)] = right[: d.v].T * root
    # Heads that look further back than a block is long predict nothing yet.
    out[:, finals.shape[1] :] *= 0.1
