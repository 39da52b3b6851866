"""The engine under asyncio: many callers, one step at a time.

A step runs in a worker thread, so the event loop stays free to take requests and to send pieces.
Nothing else may touch the engine meanwhile: what callers want (submit, abort, collect) waits in
line and is done between two steps. The pump exists only while there is work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.core import EngineCore


class AsyncDriver:
    """Drives ``core`` from one event loop. While it works, nobody else may step the core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._orders: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._streams: dict[str, asyncio.Queue[Delta | BaseException]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Pieces of all answers as they come. Leaving the loop early aborts the request.

        Raises:
            DecodingError: see :meth:`EngineCore.submit`.
        """
        name, queue = await self._order(lambda: self._submit(prompt, params, id))
        open_answers = params.n
        try:
            while open_answers:
                delta = await queue.get()
                if isinstance(delta, BaseException):
                    raise delta
                open_answers -= delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[name]
            self._later(lambda: self._forget(name))

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        id: str | None = None,
        on_delta: Callable[[Delta], None] = lambda _: None,
    ) -> RequestOutput:
        """The whole result; ``on_delta`` is called with every piece as it comes.

        Raises:
            DecodingError: see :meth:`EngineCore.submit`.
        """
        name, queue = await self._order(lambda: self._submit(prompt, params, id))
        open_answers, done = params.n, False
        try:
            while open_answers:
                delta = await queue.get()
                if isinstance(delta, BaseException):
                    raise delta
                on_delta(delta)
                open_answers -= delta.finish_reason is not None
            output: RequestOutput = await self._order(lambda: self.core.collect(name))
            done = True
            return output
        finally:
            del self._streams[name]
            if not done:
                self._later(lambda: self._forget(name))

    async def abort(self, id: str) -> None:
        """End a request; its stream gets a last piece."""
        for delta in await self._order(lambda: self.core.abort(id)):
            self._tell(delta)

    def _submit(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None
    ) -> tuple[str, asyncio.Queue[Delta | BaseException]]:
        name = self.core.submit(prompt, params, id)
        self._streams[name] = asyncio.Queue()
        return name, self._streams[name]

    def _forget(self, name: str) -> None:
        self.core.abort(name)
        self.core.collect(name)

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
                if self.core.unfinished:
                    for delta in await asyncio.to_thread(self.core.step):
                        self._tell(delta)
        except BaseException as error:
            # A step that failed would leave everyone waiting for ever.
            for queue in self._streams.values():
                queue.put_nowait(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._pump = None

    def _serve_orders(self) -> None:
        orders, self._orders = self._orders, []
        for work, future in orders:
            try:
                result = work()
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

    def _tell(self, delta: Delta) -> None:
        if delta.id in self._streams:
            self._streams[delta.id].put_nowait(delta)
