"""One engine shared by many requests: prompts in, pieces and usage out.

Everything slow happens off the event loop: the engine's steps in its own thread, tokenizers in one
thread more, with copies of their own (a Rust tokenizer that is used from two threads at once may
refuse). The loop only moves pieces.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import to_json

from dspark.api import Engine
from dspark.data.chat import Ending, prompt_ids
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.errors import DataError, DSparkError
from dspark.server.admission import Gate
from dspark.server.choice import Piece, TokenTexts, Track
from dspark.server.errors import APIError, bad_request
from dspark.server.metrics import Metrics

if TYPE_CHECKING:
    from dspark.server.handover import HandoverRole

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """``waiting`` answers beyond those decoded; bytes and seconds of a body; seconds that a reader
    may leave a piece unread."""

    waiting: int = 64
    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    stall_seconds: float = 60.0


@dataclass(frozen=True)
class Usage:
    """Tokens of one request: of its prompts, from the prefix cache, and generated."""

    prompt: int
    cached: int
    generated: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Result:
    """The last event of a request: all its prompts' outputs, in their order."""

    outputs: tuple[RequestOutput, ...]

    @property
    def usage(self) -> Usage:
        made = [len(c.ids) for output in self.outputs for c in output.completions]
        return Usage(
            sum(len(output.prompt_ids) for output in self.outputs),
            sum(output.cached_tokens for output in self.outputs),
            sum(made),
        )

    def dspark(self) -> dict[str, Any]:
        """Acceptance of the request, and the seeds that repeat its answers."""
        seeds = [c.seed for output in self.outputs for c in output.completions]
        found = [output.acceptance for output in self.outputs]
        counters = [counter for counter in found if counter is not None and counter.steps]
        total: AcceptanceCounter | None = None
        for counter in counters:
            total = total or AcceptanceCounter(counter.block_size)
            total.merge(counter)
        return {"seeds": seeds, "acceptance": None if total is None else acceptance_json(total)}


def acceptance_json(counter: AcceptanceCounter) -> dict[str, Any]:
    """The three counts kept apart, in all and per slot."""
    return {
        "steps": counter.steps,
        "drafted": counter.drafted,
        "admitted": counter.admitted,
        "accepted": counter.accepted,
        "acceptance_length": round(counter.acceptance_length, 4),
        "admitted_per_position": counter.admitted_at,
        "accepted_per_position": counter.accepted_at,
    }


Event = list[Piece] | Result
"""Pieces that came together, or the end."""


class Service:
    """``engine`` under ``name``; ``made`` is when it was, in seconds since 1970. ``role`` is this
    server's part where prompts are prefilled on another machine."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits | None = None,
        role: HandoverRole | None = None,
    ) -> None:
        self.engine, self.name, self.limits = engine, name, limits or Limits()
        self.role = role
        self.made = int(time.time())
        core = engine.core
        core.reset_counts()  # what a probe or a measurement did is not what was asked here
        self.max_length = core.scheduler.max_length
        self.gate = Gate(core.options.max_requests, self.limits.waiting)
        self.metrics = Metrics(core, self.gate, name, role)
        self._tokenizer = copy.deepcopy(engine.tokenizer)
        self.texts = TokenTexts(copy.deepcopy(engine.tokenizer))
        self.template = str(engine.tokenizer.chat_template or "")
        longest = max(map(len, engine.tokenizer.get_vocab()), default=1)
        self._most_characters = self.max_length * longest
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        mark = f"{engine.identity} {core.options.model_dump_json()}"
        self.fingerprint = "fp_" + hashlib.sha256(mark.encode()).hexdigest()[:12]

    def begin(self) -> None:
        """The event loop runs."""
        if self.role is not None:
            self.role.begin()

    def close(self) -> None:
        """Let the tokenizer's thread and the other machine go."""
        if self.role is not None:
            self.role.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that may follow ``prompt``.

        Raises:
            APIError: none.
        """
        room = self.max_length - len(prompt)
        if not prompt or room < 1:
            raise self._too_long(len(prompt))
        return room

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids that are no tokens of the target.

        Raises:
            APIError: names the first of them.
        """
        size = self.engine.core.target.vocab_size
        strange = next((i for i in ids if not 0 <= i < size), None)
        if strange is not None:
            raise bad_request(f"Token {strange} is not in the vocabulary of {size}.", "prompt")

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of plain text, as the tokenizer begins a text; without ``special``, of it alone."""
        self._check_size(len(text), "prompt")
        encode = self._tokenizer.encode
        return await self._aside(lambda: [int(i) for i in encode(text, add_special_tokens=special)])

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        ending: Ending,
    ) -> list[int]:
        """Ids of a conversation through the target's template.

        Args:
            messages: as templates read them.
            tools: that the template must show.
            variables: for the template, which may ignore them.
            ending: see :func:`dspark.data.chat.prompt_ids`.

        Raises:
            APIError: the template refuses it.
            TargetError: there is no template.
        """
        self._check_size(sum(len(m["content"]) for m in messages), "messages")

        beside = len(to_json([list(tools), dict(variables)], fallback=str))

        def render() -> list[int]:
            try:
                if beside > self._most_characters:  # perhaps shown, perhaps not
                    text = self._tokenizer.apply_chat_template(
                        messages, tools=list(tools) or None, tokenize=False, **variables
                    )
                    self._check_size(len(text), "messages")
                return prompt_ids(self._tokenizer, messages, tools, variables, ending)
            except DataError as error:
                name = "tools" if "tools" in error.expected else "messages"
                raise bad_request(
                    f"Expected {error.expected}; found {error.found}.", name
                ) from error
            except (DSparkError, APIError):
                raise
            except Exception as error:  # whatever a template of others does with odd messages
                raise bad_request(
                    f"The target's chat template refuses these messages: {error}", "messages"
                ) from error

        return await self._aside(render)

    async def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        eager: bool = True,
    ) -> AsyncIterator[Event]:
        """Pieces of all answers to all ``prompts`` as they come, then the :class:`Result`.

        Who needs them only in the end says so with ``eager`` False and is seldom woken. Closing it
        early frees what the request holds.

        Raises:
            APIError: there is no room.
            DecodingError: parameters that the engine cannot serve.
            StepError: a step of the engine failed.
        """
        answers = sum(own.n for own in params)
        with self.gate.hold(answers), self.metrics.request(params) as clock:
            tracks = {(p, i): Track(p, i) for p, own in enumerate(params) for i in range(own.n)}
            outputs: dict[int, RequestOutput] = {}
            async with aclosing(self._batches(prompts, params, eager)) as batches:  # type: ignore[type-var]
                async for number, batch in batches:
                    if isinstance(batch, RequestOutput):
                        outputs[number] = batch
                        clock.ended(number, batch)
                        continue
                    pieces = []
                    for delta in batch:
                        clock.step(number, delta)
                        pieces.append(tracks[number, delta.index].take(delta))
                    yield pieces
            self.gate.took(clock.seconds)
            yield Result(tuple(outputs[number] for number in range(len(prompts))))

    def _batches(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], eager: bool
    ) -> AsyncIterator[tuple[int, list[Delta] | RequestOutput]]:
        every = [
            self._numbered(number, prompt, own, eager)
            for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        return every[0] if len(every) == 1 else _merged(every)

    async def _numbered(
        self, number: int, prompt: Sequence[int], params: SamplingParams, eager: bool
    ) -> AsyncIterator[tuple[int, list[Delta] | RequestOutput]]:
        if self.role is not None:
            await self.role.before(prompt)
        batches = self.engine.batches_async(list(prompt), params, eager=eager)
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                yield number, batch

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check_size(self, characters: int, name: str) -> None:
        """Refuse what cannot fit before a tokenizer spends seconds on it."""
        if characters > self._most_characters:
            raise bad_request(
                f"{characters} characters cannot fit into the context of {self.max_length} tokens.",
                name,
                "context_length_exceeded",
            )

    def _too_long(self, tokens: int) -> Exception:
        return bad_request(
            f"This model's maximum context length is {self.max_length} tokens. The prompt has "
            f"{tokens}; it must have at least one and leave room for one.",
            "prompt",
            "context_length_exceeded",
        )


async def _merged(parts: list[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of all ``parts`` as they come."""
    queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()

    async def drain(part: AsyncIterator[T]) -> None:
        try:
            async with aclosing(part) as items:  # type: ignore[type-var]
                async for item in items:
                    queue.put_nowait((item, None))
            queue.put_nowait((None, None))
        except Exception as error:
            queue.put_nowait((None, error))

    tasks = [asyncio.ensure_future(drain(part)) for part in parts]
    try:
        open_parts = len(tasks)
        while open_parts:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                open_parts -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
