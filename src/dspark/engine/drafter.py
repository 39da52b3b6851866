"""The draft at serving time: cached context rows, one block pass, the sequential Markov head.

Rows of every draft layer lie in one buffer per layer and are written only from target states, after
every target forward. A block of ``block_size`` queries reads them as they lie.

A draft with a folded vocabulary (``dspark.model.support``) is projected on its few thousand
tokens only; q is exactly zero elsewhere, and verification sees it as such.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.sampling import (
    RandomStreams,
    SamplingParams,
    safe_argmax,
    sample,
    target_probabilities,
)
from dspark.model.draft import DSparkDraft
from dspark.model.layers import pack_linears, packed_or_plain
from dspark.model.support import read_support


@dataclass
class DraftRows:
    """Context rows of one request: a [1, capacity, row] tensor per layer.

    ``valid`` counts rows written from target states; nothing at or behind it is ever read.
    """

    layers: list[Tensor]
    valid: int = 0


@dataclass(frozen=True)
class DraftedBlock:
    """``ids`` drafted tokens; ``probs`` [n, V] what each was sampled from (None: one-hot)."""

    ids: list[int]
    probs: Tensor | None


class Drafter:
    """Serves ``draft`` with the target's ``head`` [V, H]. Inference only."""

    def __init__(self, draft: DSparkDraft, head: Tensor, *, pack: bool = True) -> None:
        self.draft = draft.eval().requires_grad_(False)
        self.block_size = draft.config.block_size
        self.vocab_size = draft.config.vocab_size
        self.support = read_support(draft)
        w2 = draft.markov_head.markov_w2.weight
        kept = head if self.support is None else head[self.support]
        self.w2 = w2 if self.support is None else w2[self.support]
        linear = torch.nn.Linear(kept.shape[1], kept.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(kept.to(w2.dtype), requires_grad=False)
        self.head = packed_or_plain(linear, w2.dtype) if pack else linear
        for layer in draft.draft_layers:
            layer.self_attn.prepare_serving()
        if pack:
            # The Markov output matrix is used as a plain product per slot; everything else packs.
            context = draft.context_proj
            assert isinstance(context, torch.nn.Linear)
            setattr(draft, draft.names.context_proj, packed_or_plain(context, w2.dtype))
            for layer in draft.draft_layers:
                pack_linears(layer, w2.dtype)

    def new_rows(self, capacity: int) -> DraftRows:
        """Room for ``capacity`` context rows."""
        weight = self.draft.context_norm.weight
        width = self.draft.config.row_width
        return DraftRows(
            [
                torch.zeros(1, capacity, width, dtype=weight.dtype, device=weight.device)
                for _ in self.draft.draft_layers
            ]
        )

    def write(self, rows: DraftRows, taps: Tensor, start: int) -> None:
        """Write context rows of taps [T, L, H] of the tokens at ``start``, ``start + 1``, ..."""
        positions = torch.arange(start, start + len(taps), device=taps.device).unsqueeze(0)
        context = self.draft.context(taps.unsqueeze(0).to(self.draft.context_norm.weight.dtype))
        for layer, new in zip(
            rows.layers, self.draft.context_rows(context, positions), strict=True
        ):
            layer[:, start : start + len(taps)] = new
        rows.valid = start + len(taps)

    def draft_states(self, anchor: int, position: int, rows: DraftRows) -> Tensor:
        """Backbone states [K, H] of the block whose anchor token sits at ``position``."""
        device = rows.layers[0].device
        ids = self.draft.block_ids(torch.tensor([anchor], device=device))
        positions = torch.arange(position, position + self.block_size, device=device)
        # Positions behind the target's context are clamped: those slots are never emitted.
        positions = positions.clamp(max=self.draft.config.max_position_embeddings - 1)
        context = [layer[:, :position] for layer in rows.layers]
        return self.draft.backbone(ids, positions.unsqueeze(0), context, None, serving=True)[0]

    def draft_block(self, anchor: int, position: int, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """(states [K, H], base logits [K, V']) before the Markov head."""
        states = self.draft_states(anchor, position, rows)
        return states, self.head(states)

    def propose(
        self,
        anchor: int,
        position: int,
        rows: DraftRows,
        count: int,
        params: SamplingParams | None,
        streams: RandomStreams,
        *,
        one_hot: bool,
    ) -> DraftedBlock:
        """Draft ``count`` tokens behind ``anchor``.

        ``params`` None drafts greedily for a greedy request. Otherwise tokens are drawn from q,
        which is truncated by the request's own top_k / top_p / min_p (still exact, higher
        acceptance), unless ``one_hot`` asks for argmax drafts.
        """
        states, base = self.draft_block(anchor, position, rows)
        markov = self.draft.markov_head
        state = markov.start(states[0])
        previous = torch.tensor(anchor, device=base.device)
        greedy = params is None or one_hot
        uniforms = None if greedy else streams.uniform("draft", count).to(base.device)
        ids, probs = [], []
        for k in range(count):
            m, _, state = markov.step(previous, states[k], state)
            logits = base[k] + self.w2 @ m
            if params is None or uniforms is None:
                choice = safe_argmax(logits)
            else:
                q = target_probabilities(logits.float(), params)
                choice = sample(q, uniforms[k])
                probs.append(q)
            previous = choice if self.support is None else self.support[choice]
            ids.append(int(previous))
        return DraftedBlock(ids, self._spread(probs) if probs else None)

    def _spread(self, probs: list[Tensor]) -> Tensor:
        """q over the whole vocabulary [n, V]; exactly zero outside the draft vocabulary."""
        stacked = torch.stack(probs)
        if self.support is None:
            return stacked
        return stacked.new_zeros(len(probs), self.vocab_size).index_copy_(1, self.support, stacked)
