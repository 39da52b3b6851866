"""Decoding one request at a time, for measuring: the engine with a batch of one.

Both arms of a comparison are this class, with and without a draft, so speed-ups compare one engine
with itself. Prompts are prefilled afresh every time: a prefix cache would make the second of two
equal measurements cheaper than the first.
"""

from __future__ import annotations

from typing import Literal

from dspark.config.engine import EngineOptions
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import Generation
from dspark.engine.core import EngineCore
from dspark.engine.drafter import Drafter
from dspark.model.target import Target


class Decoder:
    """Decodes with ``target`` and, when given, ``drafter``.

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
        options = EngineOptions(
            max_requests=1,
            max_batch_tokens=max(1024, target.max_context),
            cache_gib=1024.0,  # one whole context is the cap
            prefix_cache=False,
            verification=verification,
            draft_sample_method=draft_sample_method,
        )
        self.core = EngineCore(target, drafter, end_ids, options=options)

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> Generation:
        """Decode until an end token, ``max_new_tokens`` or the target's context is full.

        Raises:
            DecodingError: an empty prompt, one that leaves no room, or an inexact mode.
        """
        name = self.core.submit(prompt_ids, params)
        while self.core.unfinished:
            self.core.step()
        done = self.core.collect(name).completions[0]
        stopped = done.finish_reason == "stop"
        return Generation(list(done.ids), list(done.kinds), stopped, done.acceptance)
