"""The engine under asyncio: many callers, one step at a time.

A step runs in a worker thread, so the event loop stays free to take requests and to send pieces.
Nothing else may touch the engine meanwhile: what callers want (submit, abort, collect) waits in
line and is done between two steps. The pump exists only while there is work.

A caller may vanish at any moment, also between asking and being answered. An order whose caller is
gone is not carried out, and whatever was submitted is forgotten when its stream is closed.

A step that raises ends the requests that were running in it, each with that error; those that wait
are served on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.core import EngineCore


class StepError(RuntimeError):
    """A step of the engine raised while a request ran in it; the cause is chained."""


class AsyncDriver:
    """Drives ``core`` from one event loop. While it works, nobody else may step the core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._orders: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._streams: dict[str, asyncio.Queue[Delta | BaseException]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._numbers = itertools.count()

    async def events(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> AsyncIterator[Delta | RequestOutput]:
        """Pieces of all answers as they come, then the whole result.

        Closing the iterator early aborts the request.

        Raises:
            DecodingError: see :meth:`EngineCore.submit`.
            StepError: a step that this request ran in raised.
        """
        name = f"async-{next(self._numbers)}" if id is None else id
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        kept = False

        def submit() -> None:
            nonlocal kept
            self.core.submit(prompt, params, name)
            self._streams[name], kept = queue, True

        def collect() -> RequestOutput:
            nonlocal kept
            output = self.core.collect(name)
            kept = False
            return output

        try:
            await self._order(submit)
            open_answers = params.n
            while open_answers:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    raise StepError(f"the engine failed: {delta}") from delta
                if isinstance(delta, BaseException):
                    raise delta
                open_answers -= delta.finish_reason is not None
                yield delta
            output: RequestOutput = await self._order(collect)
            del self._streams[name]
            yield output
        finally:
            if kept:
                del self._streams[name]
                self._later(lambda: self.core.forget(name))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Only the pieces of :meth:`events`."""
        async with aclosing(self.events(prompt, params, id)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> RequestOutput:
        """Only the result of :meth:`events`."""
        async with aclosing(self.events(prompt, params, id)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, RequestOutput):
                    return event
        raise AssertionError("events end with the result")

    async def abort(self, id: str) -> None:
        """End a request; its stream gets a last piece."""
        for delta in await self._order(lambda: self.core.abort(id)):
            self._tell(delta)

    def _later(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._orders.append((work, future))
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._work())
        return future

    async def _order(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` between two steps."""
        return await self._later(work)

    async def _work(self) -> None:
        try:
            while self._orders or self.core.unfinished:
                self._serve_orders()
                if not self.core.unfinished:
                    continue
                try:
                    deltas = await asyncio.to_thread(self.core.step)
                except Exception as error:
                    self._fail(error)
                else:
                    for delta in deltas:
                        self._tell(delta)
        except BaseException as error:
            # Whatever happened, nobody may be left waiting for ever.
            for queue in self._streams.values():
                queue.put_nowait(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._pump = None

    def _fail(self, error: Exception) -> None:
        """End what ran in a step that raised; all there is, when nothing ran."""
        for name in self.core.running or list(self._streams):
            self.core.abort(name)
            if name in self._streams:
                self._streams[name].put_nowait(error)

    def _serve_orders(self) -> None:
        orders, self._orders = self._orders, []
        for work, future in orders:
            if future.cancelled():
                continue
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _tell(self, delta: Delta) -> None:
        if delta.id in self._streams:
            self._streams[delta.id].put_nowait(delta)
