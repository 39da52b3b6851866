"""Batched plain generation: the target answers prompts, several at a time, without a draft.

Used to regenerate answers on-policy. A slot that finishes is refilled as soon as an eighth of the
batch is free, so prefill stays batched and decode stays wide. Each request draws from its own
uniforms, made from its seed: the text does not depend on which requests shared its batch (up to
rounding of the matrix products, which do depend on the batch's shape).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dspark.decoding.request import FinishReason, GenerationRequest, GenerationResult
from dspark.decoding.sampling import RandomStreams, safe_argmax, sample, target_probabilities
from dspark.model.cache import shared_prefix
from dspark.model.spans import Span
from dspark.model.target import Target


@dataclass
class _Slot:
    request: GenerationRequest
    uniforms: Tensor
    ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the newest token (not yet in the cache) will be written."""
        return len(self.request.prompt_ids) + len(self.ids) - 1


class BatchGenerator:
    """Answers a list of requests; see the module docstring. ``end_ids`` finish an answer."""

    def __init__(
        self, target: Target, end_ids: frozenset[int], batch_size: int, capacity: int
    ) -> None:
        self.target = target
        self.end_ids = end_ids
        self.batch_size = batch_size
        self.capacity = capacity
        self._shared = 0
        self._prefix: Any = None

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[GenerationRequest],
        on_result: Callable[[GenerationResult], None],
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Answer all requests, calling ``on_result`` as each finishes (in completion order)."""
        queue = deque(sorted(requests, key=lambda r: len(r.prompt_ids)))
        # The transformers adapter cannot decode sequences at different positions together.
        batch = min(self.batch_size if self.target.supports_ragged else 1, len(queue))
        cache: Any = self.target.new_cache(batch, self.capacity)
        self._run_prefix(requests)
        slots: list[_Slot | None] = [None] * batch
        while True:
            free = [i for i, s in enumerate(slots) if s is None]
            if queue and len(free) * 8 >= len(slots):
                waiting = len(queue)
                cache = self._admit(free, queue, slots, cache)
                self._retire(slots, on_result)
                on_tokens(waiting - len(queue))
                continue
            live = [i for i, s in enumerate(slots) if s is not None]
            if not live:
                return
            if not queue and len(live) * 4 <= len(slots) * 3:
                cache.keep(torch.tensor(live, device=self.target.device))
                slots = [slots[i] for i in live]
            self._decode(slots, cache)
            on_tokens(len(live))
            self._retire(slots, on_result)

    def _run_prefix(self, requests: Sequence[GenerationRequest]) -> None:
        """Prefill what all prompts share, once."""
        self._shared = shared_prefix([r.prompt_ids for r in requests])
        if self._shared:
            ids = torch.tensor([requests[0].prompt_ids[: self._shared]], device=self.target.device)
            self._prefix = self.target.new_cache(1, self._shared)
            self.target.forward(ids, Span.at(0, self._shared, 1, ids.device), self._prefix)

    def _admit(
        self,
        free: list[int],
        queue: deque[GenerationRequest],
        slots: list[_Slot | None],
        cache: Any,
    ) -> Any:
        """Prefill as many queued prompts as there are free slots; return the cache to go on with.

        One padded batch, whose rows are copied into the free slots. With a single slot (also every
        target that cannot decode ragged batches) the prefilled cache simply takes over. Padding
        would run through the states of a recurrent target: its prompts come in batches of one
        length, which the queue is sorted by.
        """
        most = min(len(free), len(queue))
        if self.target.recurrent:
            same = [len(r.prompt_ids) == len(queue[0].prompt_ids) for r in islice(queue, most)]
            most = sum(same)
        taken = [queue.popleft() for _ in range(most)]
        start = self._shared
        longest = max(len(r.prompt_ids) for r in taken)
        ids = torch.zeros(len(taken), longest - start, dtype=torch.long)
        for row, request in enumerate(taken):
            ids[row, : len(request.prompt_ids) - start] = torch.tensor(request.prompt_ids[start:])
        ids = ids.to(self.target.device)
        single = len(slots) == 1
        fresh = self.target.new_cache(len(taken), self.capacity if single else longest)
        if start:
            fresh.seed(self._prefix, start)
        out = self.target.forward(ids, Span.at(start, ids.shape[1], len(taken), ids.device), fresh)
        where = torch.tensor(free[: len(taken)], device=ids.device)
        # Rows beyond a prompt's own length are padding; decoding overwrites them before any query
        # can see them, because a query at position n only attends to keys 0..n.
        if not single:
            cache.adopt(where, fresh, longest)
        last = torch.tensor([len(r.prompt_ids) - 1 - start for r in taken], device=ids.device)
        final = out.final[torch.arange(len(taken), device=ids.device), last]
        admitted: list[_Slot | None] = [_new_slot(r) for r in taken]
        self._choose(admitted, final)
        for slot, index in zip(admitted, free, strict=False):
            slots[index] = slot
        return fresh if single else cache

    def _decode(self, slots: list[_Slot | None], cache: Any) -> None:
        device = self.target.device
        tokens = torch.tensor([[s.ids[-1] if s else 0] for s in slots], device=device)
        positions = [s.position if s else 0 for s in slots]
        if len(slots) == 1:
            span = Span.at(positions[0], 1, 1, device)
        else:
            span = Span.ragged(torch.tensor(positions, device=device), 1)
        out = self.target.forward(tokens, span, cache)
        self._choose(slots, out.final[:, 0])

    def _choose(self, slots: list[_Slot | None], final: Tensor) -> None:
        """Draw the next token of every live slot from final states [B, H]."""
        logits = self.target.logits(final).float()
        chosen = safe_argmax(logits).tolist()
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            if slot.request.params.temperature > 0:
                probs = target_probabilities(logits[row], slot.request.params)
                chosen[row] = int(sample(probs, slot.uniforms[len(slot.ids)]))
            slot.ids.append(chosen[row])

    def _retire(
        self, slots: list[_Slot | None], on_result: Callable[[GenerationResult], None]
    ) -> None:
        for index, slot in enumerate(slots):
            if slot is None:
                continue
            stopped = slot.ids[-1] in self.end_ids
            if stopped or len(slot.ids) >= slot.request.params.max_new_tokens:
                reason: FinishReason = "stop" if stopped else "length"
                on_result(GenerationResult(slot.request.id, tuple(slot.ids), reason))
                slots[index] = None


def _new_slot(request: GenerationRequest) -> _Slot:
    streams = RandomStreams(request.params.seed_or_fresh())
    return _Slot(request, streams.uniform("residual", request.params.max_new_tokens))
