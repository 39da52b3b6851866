"""Prefill on one server, decoding on another: the two roles of ``dspark serve`` under asyncio.

Both are whole servers: each has target, draft and OpenAI's interface. A decode server has the pages
of a prompt computed by a prefill server before it submits the prompt; a prefill server does that
beside what it is asked itself. What does not come in time is computed where it is
(``dspark.engine.handover``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Literal

from dspark.api import Engine
from dspark.engine.handover import (
    PREFILL,
    HandoverCounts,
    Job,
    PageLink,
    PrefillNode,
    offload_of,
)
from dspark.errors import DSparkError
from dspark.hidden.transport import open_transport

LOG = logging.getLogger("dspark.server")
STREAM = "handover"


class PrefillRole:
    """Computes prompts for decode servers that come to ``endpoint``.

    Raises:
        ConfigError: the endpoint cannot be listened on.
        DecodingError: an engine without room for pages outside its cache.
    """

    name: Literal["prefill"] = "prefill"

    def __init__(self, engine: Engine, endpoint: str) -> None:
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        transport = open_transport("tcp", STREAM)
        self.node = PrefillNode(engine.core, endpoint, transport, self._told)

    def begin(self) -> None:
        """The event loop runs; what was asked before it did is begun."""
        self._loop = asyncio.get_running_loop()
        self._start_jobs()

    def close(self) -> None:
        """Close the sockets."""
        self.node.close()

    async def before(self, prompt: Sequence[int]) -> None:
        """Its own prompts are computed like any server's."""

    def _told(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._start_jobs)

    def _start_jobs(self) -> None:
        while (job := self.node.next_job()) is not None:
            task = asyncio.ensure_future(self._compute(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compute(self, job: Job) -> None:
        pages: list[tuple[str, bytes]] = []
        try:
            await self.engine.generate_async(job.tokens, PREFILL)
            export = self.node.offload.export
            pages = await self.engine.between_steps(lambda: list(export(job.tokens)))
        except DSparkError as error:  # the decode server will say so to its own caller
            LOG.info("a prompt of %d tokens was not prefilled: %s", len(job.tokens), error)
        except Exception:
            LOG.exception("a prompt of %d tokens was not prefilled", len(job.tokens))
        self.node.send(job, pages)


class DecodeRole:
    """Has prompts computed by the prefill server at ``endpoint``.

    ``patience``: seconds that a prompt waits for its pages.

    Raises:
        DecodingError: an engine without room for pages outside its cache.
    """

    name: Literal["decode"] = "decode"

    def __init__(self, engine: Engine, endpoint: str, patience: float) -> None:
        self.engine, self.patience = engine, patience
        self.offload = offload_of(engine.core)
        self.counts = HandoverCounts()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Event] = {}
        self._numbers = itertools.count()
        self.link = PageLink(endpoint, open_transport("tcp", STREAM), self._told)

    def begin(self) -> None:
        """The event loop runs."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Close the sockets."""
        self.link.close()

    async def before(self, prompt: Sequence[int]) -> None:
        """Have the pages of ``prompt`` here before it is submitted, as far as they come in time."""
        if len(prompt) <= self.engine.core.pool.page_size:
            return
        if not self.link.alive:
            self.counts.late += 1
            return
        name, there = f"prompt-{next(self._numbers)}", asyncio.Event()
        self._waiting[name] = there
        self.link.ask(name, prompt)
        try:
            came = await self._came(there)
        finally:
            del self._waiting[name]
            self.link.drop(name)
        self.counts.in_time += came
        self.counts.late += not came
        await self.engine.between_steps(self._store)

    async def _came(self, there: asyncio.Event) -> bool:
        """Wait for the pages: not for ever, and not for a server that is not heard of."""
        until = asyncio.get_running_loop().time() + self.patience
        while self.link.alive and (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait_for(there.wait(), min(left, 0.5))
                return True
            except TimeoutError:
                continue
        return there.is_set()

    def _store(self) -> None:
        """In the engine's thread: what came is found there by the prompt that waits for it."""
        for key, data in self.link.arrived():
            self.offload.store.put(key, data)
            self.counts.pages += 1
            self.counts.bytes += len(data)

    def _told(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for name, there in self._waiting.items():
            if name in self.link.done:
                there.set()


HandoverRole = PrefillRole | DecodeRole
