"""The draft at serving time: context rows, one block pass for all requests, the Markov head.

Rows of every draft layer are made only from target states, after every target forward, and lie in
the pages of their request (``dspark.model.paged``). A block of ``block_size`` queries per request
reads them as they lie. The Markov head then walks the slots one by one, over all requests at once.

A draft with a folded vocabulary (``dspark.model.support``) is projected on its few thousand
tokens only; q is exactly zero elsewhere, and verification sees it as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.decoding.params import Shape
from dspark.decoding.sampling import safe_argmax, sample, target_probabilities
from dspark.engine.confidence import Gauge
from dspark.engine.sampler import RequestSampler
from dspark.model.draft import DSparkDraft
from dspark.model.layers import pack_linears, packed_or_plain
from dspark.model.spans import BlockContext
from dspark.model.support import read_support


@dataclass
class Block:
    """A request's block: at most ``width`` tokens behind ``anchor``, drawn by ``sampler``.

    ``ids`` and ``probs`` fill up while drafting: the tokens, and [V'] what each was drawn from
    (nothing for argmax drafts). :meth:`admit` cuts them to what is verified; ``drafted`` still says
    how many there were.
    """

    sampler: RequestSampler
    output: Sequence[int]
    anchor: int
    width: int
    ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    drafted: int = 0

    def admit(self, width: int) -> None:
        """Only the first ``width`` tokens are verified."""
        del self.ids[width:], self.probs[width:]


class Drafter:
    """Serves ``draft`` with the target's ``head`` [V, H]. Inference only."""

    def __init__(self, draft: DSparkDraft, head: Tensor, *, pack: bool = True) -> None:
        self.draft = draft.eval().requires_grad_(False)
        self.block_size = draft.config.block_size
        self.vocab_size = draft.config.vocab_size
        self.row_width = draft.config.row_width
        self.layers = len(draft.draft_layers)
        self.support = read_support(draft)
        w2 = draft.markov_head.markov_w2.weight
        self.dtype = w2.dtype
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
            if isinstance(context, torch.nn.Linear):  # or it runs on FP8 weights
                setattr(draft, draft.names.context_proj, packed_or_plain(context, w2.dtype))
            for layer in draft.draft_layers:
                pack_linears(layer, w2.dtype)

    def context_rows(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """Rows [M, row] per layer of tokens with taps [M, L, H] at ``positions`` [M]."""
        context = self.draft.context(taps.unsqueeze(0).to(self.dtype))
        return [r[0] for r in self.draft.context_rows(context, positions.unsqueeze(0))]

    def block_states(
        self, anchors: Tensor, positions: Tensor, contexts: Sequence[BlockContext]
    ) -> Tensor:
        """Backbone states [R, K, H] of blocks whose anchor tokens [R] sit at ``positions`` [R], in
        the order of their ``contexts``."""
        steps = torch.arange(self.block_size, device=positions.device)
        # Positions behind the target's context are clamped: those slots are never emitted.
        last = self.draft.config.max_position_embeddings - 1
        at = (positions.unsqueeze(-1) + steps).clamp(max=last)
        return self.draft.serve(self.draft.block_ids(anchors), at, contexts)

    def gauge(self, *, whole: bool) -> Gauge:
        """Collects confidences while :meth:`draw` runs."""
        return Gauge(self.draft.confidence_head, whole)

    def draw(self, states: Tensor, blocks: Sequence[Block], gauge: Gauge | None = None) -> None:
        """Fill ``blocks`` from their backbone states [R, K, H], slot by slot.

        ``gauge`` sees every slot before its token is drawn.
        """
        base = self.head(states)
        markov = self.draft.markov_head
        state = markov.start(states[:, 0])
        previous = torch.tensor([b.anchor for b in blocks], device=base.device)
        widest = max(b.width for b in blocks)
        uniforms = torch.ones(len(blocks), widest, dtype=torch.float64)
        groups: dict[Shape | None, list[int]] = {}
        for row, block in enumerate(blocks):
            shape = block.sampler.draft_shape
            groups.setdefault(shape, []).append(row)
            if shape is not None:
                uniforms[row, : block.width] = block.sampler.streams.uniform("draft", block.width)
        for k in range(widest):
            m, embedded, state = markov.step(previous, states[:, k], state)
            logits = base[:, k] + F.linear(m, self.w2)
            self._apply_rules(logits, k, blocks)
            if gauge is not None:
                gauge.slot(states[:, k], embedded, logits)
            choice = self._choose(logits, k, blocks, groups, uniforms)
            previous = choice if self.support is None else self.support[choice]
            for block, token in zip(blocks, previous.tolist(), strict=True):
                if k < block.width:
                    block.ids.append(token)
        for block in blocks:
            block.drafted = len(block.ids)

    def spread(self, probs: Tensor) -> Tensor:
        """q [.., V'] over the whole vocabulary, exactly zero outside the draft's own."""
        if self.support is None:
            return probs
        whole = probs.new_zeros(*probs.shape[:-1], self.vocab_size)
        return whole.index_copy_(probs.dim() - 1, self.support, probs)

    def _apply_rules(self, logits: Tensor, k: int, blocks: Sequence[Block]) -> None:
        """Let every request's rules act on its row; a block may end here."""
        for row, block in enumerate(blocks):
            if k >= block.width or block.sampler.plain:
                continue
            found = block.sampler.draft_row(logits[row], block.output, block.ids, self.support)
            if found is None:
                block.width = k
            else:
                logits[row] = found

    @staticmethod
    def _choose(
        logits: Tensor,
        k: int,
        blocks: Sequence[Block],
        groups: dict[Shape | None, list[int]],
        uniforms: Tensor,
    ) -> Tensor:
        """Column [R] of every row's token; requests of equal shape are drawn together."""
        if list(groups) == [None]:
            return safe_argmax(logits)
        choice = torch.zeros(len(blocks), dtype=torch.int64, device=logits.device)
        for shape, rows in groups.items():
            own = logits if len(rows) == len(blocks) else logits[rows]
            if shape is None:
                choice[rows] = safe_argmax(own)
                continue
            q = target_probabilities(own.float(), shape)
            choice[rows] = sample(q, uniforms[rows, k].to(q.device))
            for row, probs in zip(rows, q, strict=True):
                if k < blocks[row].width:
                    blocks[row].probs.append(probs)
        return choice
