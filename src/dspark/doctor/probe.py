"""How well a draft predicts its target under a stated convention: the measuring instrument.

A draft that was trained under another convention than its config declares does not fail, it drafts
rubbish. So the doctor measures: the same draft, the same text, once as declared and once for each
mistake that has been made in public. Whichever the draft is best at is what it was trained for.

The figure is ``c_j = sum_v min(p, q)``, the probability that standard verification accepts slot j
given a right prefix, and the teacher-forced acceptance length ``1 + sum_k prod_{j<=k} c_j``. It
needs no decoding and no random numbers, so a few dozen blocks settle a question. The length is what
people know, the mean of c what decides: in the length late slots hardly count, so that it varies
more and tells less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark.config.architecture import K3DraftConfig, Qwen3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft

EMBEDDING_LAYER = -1
"""Key of the embedding's output among an example's states: what lies one layer before layer 0."""

MIN_SHARE, ERRORS = 0.1, 3.0
"""What one convention must gain over another to count: this share of the other's rejections, and so
many standard errors. Many are tried, and a draft that is not fully trained hardly uses some of its
inputs; small differences mean nothing."""


@dataclass(frozen=True)
class Example:
    """One answer of the target. ``states`` maps layer id to [S, H]; ``final`` [S, H] after and
    ``before`` [S, H] ahead of the final norm; ``ids`` [S] int64, the answer from ``prompt_length``.
    """

    ids: Tensor
    prompt_length: int
    states: Mapping[int, Tensor]
    final: Tensor
    before: Tensor


@dataclass(frozen=True)
class Convention:
    """How a draft is run and judged. Defaults are the contract's; ``layers`` and ``mask`` None
    mean the draft's own.

    ``shift`` moves the token a slot predicts (0: slot k predicts a+k+1). ``fill_in`` runs one row
    more and lets each MASK row predict its own position. ``supervision`` names the side of the
    final norm that the target's distribution is taken from.
    """

    layers: tuple[int, ...] | None = None
    shift: int = 0
    fill_in: bool = False
    supervision: Literal["post", "pre"] = "post"
    mask: int | None = None


@dataclass(frozen=True)
class Score:
    """Mean acceptance c of each slot in each example [E][K], and acceptance lengths [E]."""

    slots: tuple[tuple[float, ...], ...]
    lengths: tuple[float, ...]

    @property
    def length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def accepted(self) -> tuple[float, ...]:
        """Mean c of each example [E]."""
        return tuple(sum(c) / len(c) for c in self.slots)


class Probe:
    """Measures drafts on ``examples`` against the target's ``head`` [V, H]."""

    def __init__(
        self, examples: Sequence[Example], head: Tensor, block_size: int, blocks: int = 12
    ) -> None:
        self.head = head
        # Room behind the last anchor for a wider or shifted block than the declared one.
        reach = block_size + 2
        kept = [(e, _anchors(e, reach, blocks)) for e in examples]
        self.examples = [(e, anchors) for e, anchors in kept if len(anchors)]

    @torch.inference_mode()
    def score(self, draft: DSparkDraft, convention: Convention) -> Score:
        """Every example's acceptance length under ``convention``."""
        lengths, slots = [], []
        for example, anchors in self.examples:
            accepted = self._overlap(draft, example, anchors, convention)
            lengths.append(float(1 + accepted.cumprod(-1).sum(-1).mean()))
            slots.append(tuple(accepted.mean(0).tolist()))
        return Score(tuple(slots), tuple(lengths))

    def _overlap(
        self, draft: DSparkDraft, example: Example, anchors: Tensor, c: Convention
    ) -> Tensor:
        """c_j of every block and slot [A, K]: sum over the vocabulary of min(p, q)."""
        width = draft.config.block_size
        layers = c.layers or draft.config.target_layer_ids
        rows = width + c.fill_in
        h = self._block_states(draft, example, anchors, layers, rows, c.mask)
        h = h[:, 1:] if c.fill_in else h
        # Slot k reads the state at a+k in both layouts: it predicts the token behind that.
        source = (anchors + c.shift).unsqueeze(-1) + torch.arange(width, device=anchors.device)
        m, _ = draft.markov_head.block(example.ids[source], h)
        head = self.head.to(h.dtype)
        logits = h @ head.T + draft.markov_head.markov_w2(m)
        final = example.final if c.supervision == "post" else example.before
        target = final[source].to(head.dtype) @ head.T
        p, q = torch.softmax(target.float(), -1), torch.softmax(logits.float(), -1)
        return torch.minimum(p, q).sum(-1).clamp(max=1)

    def _block_states(
        self,
        draft: DSparkDraft,
        example: Example,
        anchors: Tensor,
        layers: tuple[int, ...],
        rows: int,
        mask_id: int | None,
    ) -> Tensor:
        """Backbone states [A, rows, H] of blocks ``[anchor, MASK, ...]`` over the rows before."""
        device, size, count = anchors.device, len(example.ids), len(anchors)
        dtype = draft.context_norm.weight.dtype
        taps = torch.stack([example.states[i] for i in layers], -2).to(dtype)
        context = draft.context(taps.unsqueeze(0))
        held = draft.context_rows(context, torch.arange(size, device=device).unsqueeze(0))
        mask = draft.config.mask_token_id if mask_id is None else mask_id
        ids = torch.full((count, rows), mask, device=device)
        ids[:, 0] = example.ids[anchors]
        positions = anchors.unsqueeze(-1) + torch.arange(rows, device=device)
        seen = torch.arange(size, device=device) < anchors.unsqueeze(-1)
        own = torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(rows, 1)
        attend = torch.cat([seen, own], -1).repeat_interleave(rows, 0)
        states = draft.backbone(
            ids.view(1, -1), positions.view(1, -1), held, attend.view(1, 1, *attend.shape)
        )
        return states.view(count, rows, -1)


def _anchors(example: Example, reach: int, blocks: int) -> Tensor:
    """Up to ``blocks`` evenly spread answer positions with ``reach`` tokens behind them."""
    last = len(example.ids) - reach
    every = torch.arange(example.prompt_length, max(last, example.prompt_length))
    if len(every) > blocks:
        every = every[torch.linspace(0, len(every) - 1, blocks).round().long()]
    return every.to(example.ids.device)


def beats(other: Score, declared: Score) -> bool:
    """Is ``other`` better than ``declared``, by enough and by more than chance?"""
    before = declared.accepted
    differences = [a - b for a, b in zip(other.accepted, before, strict=True)]
    count = len(differences)
    mean = sum(differences) / count
    enough = mean > MIN_SHARE * (1 - sum(before) / count)
    if count < 2:
        return enough
    variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
    return enough and mean > ERRORS * math.sqrt(variance / count)


def rotary_twin(draft: DSparkDraft) -> tuple[str, DSparkDraft]:
    """The other rotary pairing, and the draft as an engine with that pairing would run it.

    k3 weights pair neighbours (0, 1), qwen3 weights the halves (i, i + d/2). Rows of the rotated
    parts are reordered, so that our code for the one computes what the other would give.
    """
    config = draft.config
    state = dict(draft.state_dict())
    if isinstance(config, K3DraftConfig):
        rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
        order = _halves_to_pairs(rope)
        for i in range(config.num_hidden_layers):
            key = f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight"
            kept, rotated = state[key][:-rope], state[key][-rope:]
            state[key] = torch.cat([kept, rotated[order]])
            key = f"layers.{i}.self_attn.q_b_proj.weight"
            heads = torch.unflatten(state[key], 0, (-1, nope + rope))
            state[key] = torch.cat([heads[:, :nope], heads[:, nope:][:, order]], 1).flatten(0, 1)
        return "half-split rotary pairs", _twin(draft, state, {})
    assert isinstance(config, Qwen3DraftConfig)
    order = _halves_to_pairs(config.head_dim).argsort()
    for i in range(config.num_hidden_layers):
        for part in "qk":
            key = f"layers.{i}.self_attn.{part}_proj.weight"
            heads = torch.unflatten(state[key], 0, (-1, config.head_dim))
            state[key] = heads[:, order].flatten(0, 1)
            key = f"layers.{i}.self_attn.{part}_norm.weight"
            state[key] = state[key][order]
    return "interleaved rotary pairs", _twin(draft, state, {})


def _halves_to_pairs(width: int) -> Tensor:
    """Order in which rows (0, 1, ..., d-1) paired by halves stand as neighbours: 0, d/2, 1, ..."""
    half = torch.arange(width // 2)
    return torch.stack([half, half + width // 2], 1).flatten()


def yarn_twins(draft: DSparkDraft) -> dict[str, DSparkDraft]:
    """The same weights under other readings of a YaRN section; empty for a plain one."""
    rope = draft.config.rope_parameters
    if rope.rope_type != "yarn":
        return {}
    state = dict(draft.state_dict())
    plain = RopeParameters(rope_theta=rope.rope_theta)
    out = {"plain rotary frequencies, no YaRN": _twin(draft, state, {"rope_parameters": plain})}
    if rope.mscale_all_dim:
        unscaled = rope.model_copy(update={"mscale": 0.0, "mscale_all_dim": 0.0})
        name = "the softmax scale without the YaRN factor"
        out[name] = _twin(draft, state, {"rope_parameters": unscaled})
    return out


def _twin(draft: DSparkDraft, state: dict[str, Tensor], changes: dict[str, object]) -> DSparkDraft:
    with torch.device("meta"):
        twin = DSparkDraft(draft.config.model_copy(update=changes))
    twin.load_state_dict(state, assign=True)
    return twin.eval()
