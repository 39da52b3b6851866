"""Our own engine as a :class:`dspark.bench.play.turn.Player`, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from dspark.api import Engine
from dspark.bench.play.turn import Accepted, Answer, Ask, Counters
from dspark.data.chat import prompt_ids
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import TokenKind
from dspark.engine.answer import Completion, Delta
from dspark.errors import DecodingError


class EnginePlayer:
    """Answers by one engine. ``gone`` is never set: an engine that fails raises in every answer."""

    def __init__(self, engine: Engine, *, context: int) -> None:
        self.engine, self.context = engine, context
        self._told: list[str] = []

    @property
    def gone(self) -> str | None:
        return None

    @property
    def notices(self) -> list[str]:
        return self._told

    async def counters(self) -> Counters | None:
        return None  # every answer brings its own counts

    async def answer(self, ask: Ask) -> Answer:
        """One answer.

        Raises:
            DecodingError: the prompt leaves no room for an answer.
        """
        ids = encode(self.engine, ask)
        if ask.thinking == "on" and not self._told:
            off = encode(self.engine, ask.model_copy(update={"thinking": "off"}))
            if ids == off:
                self._told.append("The chat template has no switch for thinking.")
        room = self.context - len(ids)
        if room < 1:
            raise DecodingError(
                expected=f"a prompt of less than {self.context} tokens",
                found=f"{len(ids)}",
                where="prompt",
                fix="Measure it on a target with a longer context.",
            )
        params = SamplingParams(
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            max_new_tokens=min(ask.max_tokens, room),
        )
        start = time.monotonic()
        first: float | None = None

        def seen(delta: Delta) -> None:
            nonlocal first
            if first is None and delta.ids:
                first = time.monotonic() - start

        output = await self.engine.generate_async(ids, params, on_delta=seen)
        seconds = time.monotonic() - start
        (completion,) = output.completions
        return Answer(
            text=completion.text,
            ids=completion.ids,
            tokens=len(completion.ids),
            prompt_tokens=len(output.prompt_ids),
            finish=completion.finish_reason,
            first=first,
            seconds=seconds,
            accepted=accepted_of(completion),
            source="engine" if completion.acceptance is not None else "none",
        )


def encode(engine: Engine, ask: Ask) -> list[int]:
    """Ids of the conversation, with the template's own switch for thinking where one is asked for.

    Raises:
        DataError, TargetError: messages that the template refuses.
    """
    messages = [dict(message) for message in ask.messages]
    if ask.thinking == "default":
        return prompt_ids(engine.tokenizer, messages)
    on = ask.thinking == "on"
    ids: Any = engine.tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
        enable_thinking=on,
        thinking=on,
    )
    return [int(i) for i in ids]


def accepted_of(completion: Completion) -> Accepted | None:
    """Counts of one answer, step by step."""
    counter = completion.acceptance
    if counter is None:
        return None
    steps = steps_of(completion.kinds)
    # Steps that drafted nothing are in the kinds and not in the counter.
    told = tuple(steps) if len(steps) == counter.steps else None
    return Accepted(
        steps=counter.steps,
        drafted=counter.drafted,
        admitted=counter.admitted,
        accepted=counter.accepted,
        accepted_at=tuple(counter.accepted_at),
        admitted_at=tuple(counter.admitted_at),
        per_step=told if told is not None and sum(told) == counter.accepted else None,
    )


def steps_of(kinds: Iterable[TokenKind]) -> list[int]:
    """Accepted tokens of every step: runs that a bonus or a correction ends.

    The first token comes from the prompt's own forward and is no step. An answer that ends inside
    an accepted run has a last step without an end.
    """
    steps: list[int] = []
    run = 0
    for kind in list(kinds)[1:]:
        if kind == "accepted":
            run += 1
        else:
            steps.append(run)
            run = 0
    return [*steps, run] if run else steps
