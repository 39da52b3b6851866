"""Blocks as they were drafted and accepted, for calibration and for simulations.

Everything drafted is verified here, so that the outcome of every slot is known; blocks that an
answer's end cut short are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.decoding.params import SamplingParams
from dspark.decoding.schedule import Floats, Ints
from dspark.engine.admission import Live
from dspark.engine.core import EngineCore
from dspark.errors import DecodingError


@dataclass
class Blocks:
    """Rows in the order in which they were verified: ``logits`` [K] of the confidence head,
    ``accepted`` tokens, and the ``answer`` (by number) that each belongs to."""

    slots: int
    logits: list[Floats] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def arrays(self) -> tuple[Floats, Ints, Ints]:
        """(logits [N, K], accepted [N], answer [N])."""
        logits = np.array(self.logits).reshape(-1, self.slots)
        accepted, answer = (np.array(x, dtype=np.int64) for x in (self.accepted, self.answer))
        return logits, accepted, answer


def record_blocks(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    on_answer: Callable[[int], None] = lambda _: None,
) -> Blocks:
    """Answer ``prompts``, each with its own ``params``, and keep every whole block.

    Raises:
        DecodingError: an engine without a draft or with another scheduler than ``fixed``.
    """
    if core.drafter is None or core.options.scheduler != "fixed":
        raise DecodingError(
            expected="an engine with a draft and the scheduler fixed",
            found="no draft" if core.drafter is None else core.options.scheduler,
            where="recording of blocks",
            fix="Record everything that is drafted.",
        )
    blocks = Blocks(core.drafter.block_size)
    numbers: dict[str, int] = {}

    def record(live: Live, accepted: Ints) -> None:
        for row, whole in enumerate(live.widths == blocks.slots):
            if whole:
                blocks.logits.append(live.signals.head[row].copy())
                blocks.accepted.append(int(accepted[row]))
                blocks.answer.append(numbers[live.requests[row].id.rpartition("/")[0]])

    core.admission.record = record
    try:
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            numbers[core.submit(prompt, own)] = number
        waiting = set(numbers)
        while core.unfinished:
            core.step()
            for name in [n for n in waiting if core.finished(n)]:
                waiting.remove(name)
                core.collect(name)
                on_answer(1)
    finally:
        core.admission.record = None
    return blocks
