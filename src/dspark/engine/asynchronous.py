"""The engine under asyncio: many callers, one thread that steps.

While there is work, a thread of its own steps the engine; the event loop only takes requests and
sends pieces, and the engine never waits for it. Nothing else may touch the engine meanwhile: what
callers want (submit, abort, collect) waits in line and is done in that thread between two steps.

A caller may vanish at any moment, also between asking and being answered. A request whose caller is
gone is not submitted, or forgotten again if it just was; whoever closes a stream early finds its
pages free.

A step that raises ends the requests that were running in it, each with that error; those that wait
are served on.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.core import EngineCore
from dspark.errors import DecodingError

T = TypeVar("T")


class StepError(RuntimeError):
    """A step of the engine raised while a request ran in it; the cause is chained."""


@dataclass(frozen=True)
class _Order:
    """``work`` is done between two steps and resolves ``future``.

    With ``undo`` it is not done for a caller who is gone, and undone for one who went meanwhile.
    """

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    undo: Callable[[], Any] | None


class _Inbox:
    """Pieces on their way to one caller, who is woken when it matters; of the event loop alone."""

    def __init__(self, eager: bool) -> None:
        self._eager, self._begun = eager, False
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if self._eager or not self._begun or delta.finish_reason is not None:
            self._ready.set()
        self._begun = True

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def take(self) -> list[Delta]:
        """Everything that came, at least one piece.

        Raises:
            StepError: the engine failed.
        """
        await self._ready.wait()
        taken, self._deltas = self._deltas, []
        if self._error is None:
            self._ready.clear()
        elif not taken:
            raise StepError(f"the engine failed: {self._error}") from self._error
        return taken


class AsyncDriver:
    """Drives ``core`` for one event loop. While it works, nobody else may step the core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._lock = threading.Lock()
        self._orders: deque[_Order] = deque()
        self._working = False
        self._streams: dict[str, _Inbox] = {}
        self._own: set[str] = set()  # touched by the thread alone
        self._numbers = itertools.count()

    async def batches(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        id: str | None = None,
        *,
        eager: bool = True,
    ) -> AsyncIterator[list[Delta] | RequestOutput]:
        """Pieces of all answers as they come, those that wait together, then the whole result.

        Who does not read along (``eager`` False) is woken for the first piece and for the end of
        each answer only. Closing the iterator early aborts the request.

        Raises:
            DecodingError: see :meth:`EngineCore.submit`.
            StepError: a step that this request ran in raised.
        """
        name = f"async-{next(self._numbers)}" if id is None else id
        if name in self._streams:
            raise DecodingError(
                expected="a request id that is not in use",
                found=repr(name),
                where="submit",
                fix="Wait for the first request to end, or use another id.",
            )
        inbox = self._streams[name] = _Inbox(eager)
        submitted = self._order(
            lambda: self._submit(prompt, params, name), lambda: self._forget(name)
        )
        held = True
        try:
            await submitted
            open_answers = params.n
            while open_answers:
                deltas = await inbox.take()
                open_answers -= sum(delta.finish_reason is not None for delta in deltas)
                yield deltas
            output: RequestOutput = await self._order(lambda: self._collect(name))
            held = False
            yield output
        finally:
            del self._streams[name]
            # A caller may be cancelled between its request's submission and hearing of it.
            if held and submitted.done() and not submitted.cancelled():
                await self._order(lambda: self._forget(name))

    async def events(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> AsyncIterator[Delta | RequestOutput]:
        """:meth:`batches`, piece by piece."""
        async with aclosing(self.batches(prompt, params, id)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if isinstance(batch, RequestOutput):
                    yield batch
                else:
                    for delta in batch:
                        yield delta

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Only the pieces of :meth:`events`."""
        async with aclosing(self.events(prompt, params, id)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        id: str | None = None,
        on_delta: Callable[[Delta], None] = lambda _: None,
    ) -> RequestOutput:
        """Only the result of :meth:`events`; ``on_delta`` is told every piece as it comes."""
        async with aclosing(self.events(prompt, params, id)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, RequestOutput):
                    return event
                on_delta(event)
        raise AssertionError("events end with the result")

    async def abort(self, id: str) -> None:
        """End a request; its stream gets a last piece."""
        self._tell(await self._order(lambda: self.core.abort(id)))

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Result of ``work``, done in the engine's thread while it does nothing else."""
        result: T = await self._order(work)
        return result

    def _submit(self, prompt: Sequence[int], params: SamplingParams, name: str) -> None:
        self.core.submit(prompt, params, name)
        self._own.add(name)

    def _collect(self, name: str) -> RequestOutput:
        self._own.discard(name)
        return self.core.collect(name)

    def _forget(self, name: str) -> None:
        self._own.discard(name)
        self.core.forget(name)

    @property
    def _busy(self) -> bool:
        """Whether a request of this driver is unfinished; others are none of its thread's work."""
        return any(not self.core.finished(name) for name in self._own)

    def _order(
        self, work: Callable[[], Any], undo: Callable[[], Any] | None = None
    ) -> asyncio.Future[Any]:
        """Do ``work`` between two steps."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._orders.append(_Order(work, future, undo))
            start, self._working = not self._working, True
        if start:
            threading.Thread(target=self._work, name="dspark engine", daemon=True).start()
        return future

    def _work(self) -> None:
        """The engine's thread: orders and steps, until there are neither."""
        loop: asyncio.AbstractEventLoop | None = None
        while True:
            with self._lock:
                orders, self._orders = self._orders, deque()
                if not orders and not self._busy:
                    self._working = False
                    return
            for order in orders:
                loop = order.future.get_loop()
                self._serve(order, loop)
            if not self._busy:
                continue
            try:
                deltas = self.core.step()
            except Exception as error:
                names = self.core.running or list(self._streams)
                for name in names:
                    self.core.abort(name)
                self._post(loop, self._fail, names, error)
            else:
                self._post(loop, self._tell, deltas)

    def _serve(self, order: _Order, loop: asyncio.AbstractEventLoop) -> None:
        if order.undo is not None and order.future.cancelled():
            return
        try:
            result, error = order.work(), None
        except Exception as fault:
            result, error = None, fault
        self._post(loop, self._resolve, order, result, error)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop | None, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call`` in the event loop; a loop that is closed has nobody left to tell."""
        with suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(call, *args)

    def _resolve(self, order: _Order, result: Any, error: Exception | None) -> None:
        if order.future.cancelled():
            if order.undo is not None and error is None:
                self._order(order.undo)
        elif error is not None:
            order.future.set_exception(error)
        else:
            order.future.set_result(result)

    def _fail(self, names: Sequence[str], error: Exception) -> None:
        for name in names:
            if name in self._streams:
                self._streams[name].fail(error)

    def _tell(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.id in self._streams:
                self._streams[delta.id].put(delta)
