"""Prefill on one machine, decoding on another: pages move, requests never depend on them.

The decode node asks a prefill node for a prompt and gets its full pages (rows of target AND draft,
and the state of a hybrid target) in the format of ``dspark.engine.pagefile``, over the transports
that hidden states use (``dspark.hidden.transport``). They land in the decode engine's offload store
and are found there like any page that had left its own cache: checked, then counted as cached. What
is behind the last full page is computed by the decode node itself, so its first block already
drafts from transferred rows.

Nothing waits for a page for ever. A prompt is submitted when its pages are all there or its
deadline is over, and whatever is missing, late, damaged or of other weights is computed. So a
prefill node may die at any moment: requests take longer. It keeps no request, only pages. What a
decode node that dies was asked is asked again by whoever holds it: ``dspark.server.route`` in front
of several.

Cost on the wire at Kimi-K3's size: 29 rows of 576 fp8 numbers a token and one state a prompt; the
draft's five of them are a twenty-fifth of the five hidden states they are made from.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta
from dspark.engine.core import EngineCore
from dspark.engine.offload import Offload
from dspark.errors import ConfigError, DecodingError, StreamError
from dspark.hidden.codec import Part
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.transport import Transport

PREFILL = SamplingParams(max_new_tokens=1, speculate=False)
PING, LOST_PING, SILENCE = 0.5, 5.0, 3.0  # seconds


def offload_of(core: EngineCore) -> Offload:
    """Where pages outside the cache of ``core`` are. Raises DecodingError when it has none."""
    if core.offload is None:
        raise DecodingError(
            expected="an engine with a place for pages outside its cache",
            found="one without offload",
            where="prefill/decode split",
            fix="Set offload_host_gib to hold the prompts in flight, and leave prefix_cache on.",
        )
    return core.offload


class Job(NamedTuple):
    """``tokens`` whose pages ``peer`` wants to have under ``name``."""

    peer: bytes
    name: str
    tokens: list[int]


@dataclass
class SentCounts:
    """Prompts that were prefilled for others, and what went out for them."""

    prompts: int = 0
    pages: int = 0
    bytes: int = 0


class PrefillNode(Postman):
    """Answers ``prefill`` messages with pages. :meth:`work` computes; the thread only moves.

    Whoever drives the engine in another way takes :meth:`next_job` when ``on_job`` is called (in
    the thread), has the prompt computed, and :meth:`send`s what :meth:`Offload.export` gives.

    Args:
        core: without a draft it could make no draft rows, and is refused by its peers' checks.
        endpoint: of ZeroMQ, to bind.
        transport: writer's end; the same kind and stream as the decode nodes'.
    """

    def __init__(
        self, core: EngineCore, endpoint: str, transport: Transport,
        on_job: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__("prefill node")
        self.core, self.transport, self.on_job = core, transport, on_job
        self.offload = offload_of(core)
        self.counts = SentCounts()
        self._jobs: deque[Job] = deque()
        try:
            self.add_socket(zmq.ROUTER).bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                expected="an address and a port that decode nodes can come to",
                found=f"{endpoint}: {error}",
                where="prefill node",
                fix="Stop what listens there, or name another port.",
            ) from error
        self.start()

    def received(self, socket: int, frames: list[Part]) -> None:
        try:
            head, _ = unpack(frames[1:])
            peer = bytes(frames[0])
            if head["type"] == "ping":
                self.post(0, [peer, *pack({"type": "pong"})])
                return
            tokens = [int(token) for token in head["tokens"]]
            self._jobs.append(Job(peer, str(head["id"]), tokens))
        except (ValueError, LookupError, TypeError):
            return  # nobody of ours: whoever asked goes on by itself at its deadline
        self.on_job()

    def tick(self) -> None:
        """Nothing is due by the clock."""

    def next_job(self) -> Job | None:
        """What was asked for first and not taken yet."""
        return self._jobs.popleft() if self._jobs else None

    def send(self, job: Job, pages: Iterable[tuple[str, bytes]]) -> None:
        """Send ``pages`` (names and bytes), and that there are no more."""
        sent = 0
        for key, data in pages:
            head = {"type": "page", "id": job.name, "name": key}
            self.post(0, [job.peer, *pack(head, self.transport.put(key, [data]))])
            sent += 1
            self.counts.bytes += len(data)
        self.counts.prompts += 1
        self.counts.pages += sent
        self.post(0, [job.peer, *pack({"type": "done", "id": job.name, "pages": sent})])

    def work(self) -> bool:
        """Compute and send one prompt; False without one."""
        job = self.next_job()
        if job is None:
            return False
        pages: Iterable[tuple[str, bytes]] = ()
        try:
            answer = self.core.submit(job.tokens, PREFILL)
            while self.core.unfinished:
                self.core.step()
            self.core.collect(answer)
            pages = self.offload.export(job.tokens)
        except DecodingError:
            pass  # an impossible prompt: the decode node will say so to its own caller
        self.send(job, pages)
        return True


class PageLink(Postman):
    """The decode node's end: asks, and keeps what arrives until :meth:`arrived` is called.

    ``on_done`` is called (in the thread) when all pages of a prompt have come.
    """

    def __init__(
        self, endpoint: str, transport: Transport, on_done: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__("page link")
        self.transport, self.on_done = transport, on_done
        self.pages: deque[tuple[str, bytes]] = deque()
        self.done: set[str] = set()
        self._asked: set[str] = set()
        self._heard = self._pinged = time.monotonic()
        self._answered = True
        self.add_socket(zmq.DEALER).connect(endpoint)
        self.start()

    @property
    def alive(self) -> bool:
        """Whether the prefill node was heard of lately; it answers while it computes, too."""
        return time.monotonic() - self._heard < SILENCE

    def ask(self, name: str, tokens: Sequence[int]) -> None:
        """Have the pages of ``tokens`` sent under ``name``."""
        self._asked.add(name)
        self.post(0, pack({"type": "prefill", "id": name, "tokens": list(tokens)}))

    def drop(self, name: str) -> None:
        """Nobody waits for ``name`` any more."""
        self._asked.discard(name)
        self.done.discard(name)

    def received(self, socket: int, frames: list[Part]) -> None:
        self._heard = time.monotonic()
        try:
            head, parts = unpack(frames)
            if head["type"] == "pong":
                self._answered = True
            elif head["type"] == "done" and (name := str(head["id"])) in self._asked:
                self.done.add(name)
                self.on_done()
            elif head["type"] == "page":
                key = str(head["name"])
                body = b"".join(bytes(part) for part in self.transport.get(key, parts))
                self.transport.ack(key)
                self.pages.append((key, body))
        except (ValueError, LookupError, TypeError, StreamError):
            return  # a page that cannot be read is a page that is computed

    def tick(self) -> None:
        """Ask whether the other end is there: often while it answers, seldom while it does not,
        because what is asked of nobody waits in memory."""
        now = time.monotonic()
        if now - self._pinged > (PING if self._answered else LOST_PING):
            self._pinged, self._answered = now, False
            self.post(0, pack({"type": "ping"}))

    def arrived(self) -> list[tuple[str, bytes]]:
        """Pages that came since the last call."""
        return [self.pages.popleft() for _ in range(len(self.pages))]


@dataclass
class _Waiting:
    name: str
    prompt: list[int]
    params: SamplingParams
    deadline: float


@dataclass
class HandoverCounts:
    """Prompts whose pages came in time, and those that went on without (all of) them."""

    in_time: int = 0
    late: int = 0
    pages: int = 0
    bytes: int = 0


class DecodeNode:
    """An :class:`EngineCore` whose prompts are prefilled elsewhere; the same three methods.

    ``patience`` is how many seconds a prompt waits for its pages; it does not wait for a node that
    is not heard of. Prompts of less than one page are not asked for.
    """

    def __init__(self, core: EngineCore, link: PageLink, patience: float = 10.0) -> None:
        self.core, self.link, self.patience = core, link, patience
        self.offload = offload_of(core)
        self.counts = HandoverCounts()
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count()

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or self.core.unfinished

    def submit(self, prompt: Sequence[int], params: SamplingParams, id: str | None = None) -> str:
        """As :meth:`EngineCore.submit`; an impossible prompt is refused by :meth:`step`."""
        name = f"prompt-{next(self._numbers)}" if id is None else id
        if len(prompt) <= self.core.pool.page_size or not self.link.alive:
            return self.core.submit(prompt, params, name)
        deadline = time.monotonic() + self.patience
        self._waiting[name] = _Waiting(name, list(prompt), params, deadline)
        self.link.ask(name, prompt)
        return name

    def step(self) -> list[Delta]:
        """Take what arrived, submit who need not wait any longer, and one step of the engine."""
        for key, data in self.link.arrived():
            self.offload.store.put(key, data)
            self.counts.pages += 1
            self.counts.bytes += len(data)
        now = time.monotonic()
        for waiting in list(self._waiting.values()):
            there = waiting.name in self.link.done
            if there or now >= waiting.deadline or not self.link.alive:
                self.link.drop(waiting.name)
                del self._waiting[waiting.name]
                self.counts.in_time += there
                self.counts.late += not there
                self.core.submit(waiting.prompt, waiting.params, waiting.name)
        if not self.core.unfinished:
            time.sleep(0.001)
            return []
        return self.core.step()

    def collect(self, id: str) -> Any:
        """As :meth:`EngineCore.collect`."""
        return self.core.collect(id)
