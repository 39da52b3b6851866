"""Batch-1 decoding with a draft: draft a block, verify it in one target forward, keep what holds.

One round. The anchor is the last committed token; the target's state at the anchor does not exist
yet. The draft reads its cached context rows (tokens before the anchor), drafts ``block_size``
tokens in one pass plus the sequential Markov head, and the target runs ``[anchor, drafts...]`` to
get its own distributions. Verification (``dspark.decoding.verify``) accepts a prefix and supplies
one more token, the next anchor. The taps of the accepted tokens become the draft's new context
rows; rejected rows are overwritten by the next round and never read.

The plain arm is the same loop with nothing drafted, so speed-ups compare one engine with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.decoding.acceptance import AcceptanceCounter, StepCount, trim_at_end
from dspark.decoding.request import Generation, TokenKind
from dspark.decoding.sampling import (
    RandomStreams,
    SamplingParams,
    safe_argmax,
    sample,
    target_probabilities,
)
from dspark.decoding.verify import Rule, check_modes, decide, decide_greedy
from dspark.engine.drafter import Drafter
from dspark.errors import DecodingError
from dspark.model.cache import Span
from dspark.model.target import Target


class Decoder:
    """Decodes one request at a time with ``target`` and, when given, ``drafter``.

    ``verification`` is ``standard`` or ``block``; ``draft_sample_method`` ``greedy`` or
    ``probabilistic``. Combinations that would not be exact are refused per request.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        end_ids: frozenset[int],
        *,
        verification: Literal["standard", "block"] = "block",
        draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.end_ids = end_ids
        self.verification = verification
        self.draft_sample_method = draft_sample_method

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        on_tokens: Callable[[list[int]], None] = lambda _: None,
    ) -> Generation:
        """Decode until an end token, ``max_new_tokens`` or the target's context is full.

        Raises:
            DecodingError: an empty prompt, one that leaves no room, or an inexact mode.
        """
        rule = check_modes(self.verification, self.draft_sample_method, params.temperature)
        room = self.target.max_context - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise DecodingError(
                expected=f"a prompt of 1 to {self.target.max_context - 1} tokens",
                found=f"{len(prompt_ids)} tokens",
                where="prompt",
                fix="Shorten the prompt or use a target with a longer context.",
            )
        limit = min(params.max_new_tokens, room)
        run = _Request(self, prompt_ids, params, rule, limit)
        run.prefill()
        on_tokens(run.out.ids)
        while not run.finished:
            on_tokens(run.step())
        return run.out


class _Request:
    """State of one request: caches, random streams, and what came out so far."""

    def __init__(
        self, engine: Decoder, prompt: list[int], params: SamplingParams, rule: Rule, limit: int
    ) -> None:
        self.engine, self.target, self.drafter = engine, engine.target, engine.drafter
        self.prompt, self.params, self.rule, self.limit = prompt, params, rule, limit
        self.streams = RandomStreams(params.seed)
        width = self.drafter.block_size if self.drafter else 0
        # Slots for a whole block are there before anything is drafted.
        capacity = len(prompt) + limit + width + 1
        self.cache: Any = self.target.new_cache(1, capacity)
        self.rows = self.drafter.new_rows(capacity) if self.drafter else None
        self.out = Generation(counter=AcceptanceCounter(width) if width else None)

    @property
    def finished(self) -> bool:
        return self.out.stopped or len(self.out.ids) >= self.limit

    def prefill(self) -> None:
        """Run the prompt; the first token comes from the target alone."""
        final = self._forward(self.prompt, 0, keep=len(self.prompt))
        logits = self.target.logits(final[-1:])
        if self.rule == "greedy":
            self._emit([int(safe_argmax(logits[0]))], ["bonus"])
        else:
            self._emit(
                [self._draw(target_probabilities(logits[0].float(), self.params))], ["bonus"]
            )

    def _forward(self, tokens: list[int], start: int, keep: int | None = None) -> Tensor:
        """Target forward at ``start``; context rows of the first ``keep`` tokens are written."""
        ids = torch.tensor([tokens], device=self.target.device)
        out = self.target.forward(ids, Span.at(start, len(tokens), 1, ids.device), self.cache)
        self._taps = out.taps[0]
        if keep is not None:
            self._write_rows(start, keep)
        return out.final[0]

    def _write_rows(self, start: int, count: int) -> None:
        if self.drafter is not None and self.rows is not None:
            self.drafter.write(self.rows, self._taps[:count], start)

    def _draw(self, probs: Tensor) -> int:
        uniform = self.streams.uniform("residual", 1)[0].to(probs.device)
        return int(sample(probs, uniform))

    def step(self) -> list[int]:
        """One round; returns the tokens it committed."""
        anchor_at = len(self.prompt) + len(self.out.ids) - 1
        anchor = self.out.ids[-1]
        # No more drafts than could still be emitted: a bonus always follows.
        room = self.limit - len(self.out.ids) - 1
        if self.drafter is None or self.rows is None or room < 1:
            final = self._forward([anchor], anchor_at, keep=1)
            return self._plain(final)
        admitted = min(self.drafter.block_size, room)
        q_params = self.params if self.rule != "greedy" else None
        draft = self.drafter.propose(
            anchor, anchor_at, self.rows, admitted, q_params, self.streams,
            one_hot=self.engine.draft_sample_method == "greedy",
        )  # fmt: skip
        final = self._forward([anchor, *draft.ids], anchor_at)
        accepted, following = self._verify(final, draft.ids, draft.probs)
        self._write_rows(anchor_at, accepted + 1)
        last: TokenKind = "bonus" if accepted == admitted else "corrected"
        drafted: TokenKind = "accepted"
        kinds = [*repeat(drafted, accepted), last]
        kept = self._emit([*draft.ids[:accepted], following], kinds)
        assert self.out.counter is not None
        # What was accepted behind an end token is dropped, and not counted either.
        self.out.counter.add(StepCount(admitted, admitted, min(accepted, len(kept))))
        return kept

    def _plain(self, final: Tensor) -> list[int]:
        logits = self.target.logits(final[-1:])
        if self.rule == "greedy":
            return self._emit([int(safe_argmax(logits[0]))], ["bonus"])
        probs = target_probabilities(logits[0].float(), self.params)
        return self._emit([self._draw(probs)], ["bonus"])

    def _verify(self, final: Tensor, ids: list[int], q: Tensor | None) -> tuple[int, int]:
        logits = self.target.logits(final)
        drafted = torch.tensor(ids, device=logits.device)
        if self.rule == "greedy":
            return decide_greedy(safe_argmax(logits), drafted)
        p = target_probabilities(logits.float(), self.params)
        u = self.streams.uniform("accept", len(ids)).to(logits.device)
        decision = decide(self.rule, p, q, drafted, u)
        return decision.accepted, self._draw(decision.next_probs)

    def _emit(self, tokens: list[int], kinds: list[TokenKind]) -> list[int]:
        """Commit tokens; everything behind an end token inside the run is dropped."""
        kept, self.out.stopped = trim_at_end(tokens, self.engine.end_ids)
        self.out.ids += kept
        self.out.kinds += kinds[: len(kept)]
        return kept
