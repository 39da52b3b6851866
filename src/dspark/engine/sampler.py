"""What is particular to one request when a token is chosen: its rule, its rules, its randomness.

A request draws from three streams of its own (``dspark.decoding.sampling.RandomStreams``) and takes
as many numbers from each as its own text decides, never its neighbours: at a fixed seed the answer
does not depend on who shares the batch, nor on preemption, up to rounding of the forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.decoding.params import SamplingParams, Shape
from dspark.decoding.processors import LogitRules
from dspark.decoding.sampling import RandomStreams
from dspark.decoding.verify import Rule
from dspark.engine.grammar import GrammarRows


@dataclass
class RequestSampler:
    """``one_hot`` asks for argmax drafts; ``rules`` and ``grammar`` are None when there are none.

    ``truncate`` gives the draft the request's own top_k, top_p and min_p: it then never proposes
    what the target cannot emit. Exact either way, because q is what was drawn from.
    """

    params: SamplingParams
    rule: Rule
    streams: RandomStreams
    one_hot: bool = False
    truncate: bool = True
    rules: LogitRules | None = None
    grammar: GrammarRows | None = None
    _open: Shape = field(init=False)

    def __post_init__(self) -> None:
        self._open = Shape(self.params.temperature, 0, 1.0, 0.0)

    @property
    def draft_shape(self) -> Shape | None:
        """How drafted tokens are drawn; None is argmax."""
        if self.rule == "greedy" or self.one_hot:
            return None
        return self.params.shape if self.truncate else self._open

    @property
    def plain(self) -> bool:
        """Whether logits are used as they come."""
        return self.rules is None and self.grammar is None

    def target_rows(self, logits: Tensor, output: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits [n + 1, V] behind every prefix of ``drafted``, under the rules, float32."""
        rows = logits.float()
        if self.rules is not None:
            rows = self.rules.apply(rows, output, drafted)
        if self.grammar is not None:
            masks = self.grammar.allowed(output, drafted)
            rows = torch.stack(
                [
                    row if mask is None else row.masked_fill(~mask, float("-inf"))
                    for row, mask in zip(rows, masks, strict=True)
                ]
            )
        return rows

    def draft_row(
        self, logits: Tensor, output: Sequence[int], drafted: Sequence[int], support: Tensor | None
    ) -> Tensor | None:
        """Draft logits [V'] behind ``drafted``, under the rules.

        None when the grammar allows none of the draft's tokens, or the answer is over: the block
        ends here. That depends on the tokens before this slot and not on the one drawn for it, so
        verification of the shorter block stays exact.
        """
        row = logits.float()
        if self.rules is not None:
            row = self.rules.apply(row.unsqueeze(0), output, drafted, len(drafted), support)[0]
        if self.grammar is not None:
            mask = self.grammar.behind(output, drafted)
            if mask is None:
                return None
            own = mask if support is None else mask[support]
            if not bool(own.any()):
                return None
            row = row.masked_fill(~own, float("-inf"))
        return row
