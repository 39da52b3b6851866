"""Prefill on one machine, decoding on another: pages move, requests never depend on them.

The decode node asks a prefill node for a prompt and gets its full pages (rows of target AND draft,
and the state of a hybrid target) in the format of ``dspark.engine.pagefile``, over the transports
that hidden states use (``dspark.hidden.transport``). They land in the decode engine's offload store
and are found there like any page that had left its own cache: checked, then counted as cached. What
is behind the last full page is computed by the decode node itself, so its first block already
drafts from transferred rows.

Nothing waits for a page for ever. A prompt is submitted when its pages are all there or its
deadline is over, and whatever is missing, late, damaged or of other weights is computed. So a
prefill node may die at any moment: requests take longer. It keeps no request, only pages: a decode
node that dies takes its own requests with it and nothing of the prefill node's.

Cost on the wire at Kimi-K3's size: 29 rows of 576 fp8 numbers a token and one state a prompt; the
draft's five of them are a twenty-fifth of the five hidden states they are made from.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta
from dspark.engine.core import EngineCore
from dspark.engine.offload import Offload
from dspark.errors import DecodingError, StreamError
from dspark.hidden.codec import Part
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.transport import Transport


def _offload(core: EngineCore) -> Offload:
    if core.offload is None:
        raise DecodingError(
            expected="an engine with a place for pages outside its cache",
            found="one without offload",
            where="prefill/decode split",
            fix="Set offload_host_gib to hold the prompts in flight, and leave prefix_cache on.",
        )
    return core.offload


class PrefillNode(Postman):
    """Answers ``prefill`` messages with pages. :meth:`work` computes; the thread only moves.

    Args:
        core: without a draft it could make no draft rows, and is refused by its peers' checks.
        endpoint: of ZeroMQ, to bind.
        transport: writer's end; the same kind and stream as the decode nodes'.
    """

    def __init__(self, core: EngineCore, endpoint: str, transport: Transport) -> None:
        super().__init__("prefill node")
        self.core, self.transport = core, transport
        self.offload = _offload(core)
        self._jobs: deque[tuple[bytes, str, list[int]]] = deque()
        self.add_socket(zmq.ROUTER).bind(endpoint)
        self.start()

    def received(self, socket: int, frames: list[Part]) -> None:
        try:
            head, _ = unpack(frames[1:])
            tokens = [int(token) for token in head["tokens"]]
            self._jobs.append((bytes(frames[0]), str(head["id"]), tokens))
        except (ValueError, LookupError, TypeError):
            return  # nobody of ours: whoever asked goes on by itself at its deadline

    def tick(self) -> None:
        """Nothing is due by the clock."""

    def work(self) -> bool:
        """Compute and send one prompt; False without one."""
        if not self._jobs:
            return False
        peer, name, tokens = self._jobs.popleft()
        sent = 0
        try:
            answer = self.core.submit(tokens, SamplingParams(max_new_tokens=1, speculate=False))
            while self.core.unfinished:
                self.core.step()
            self.core.collect(answer)
            for key, data in self.offload.export(tokens):
                parts = self.transport.put(key, [data])
                head = {"type": "page", "id": name, "name": key}
                self.post(0, [peer, *pack(head, parts)])
                sent += 1
        except DecodingError:
            pass  # an impossible prompt: the decode node will say so to its own caller
        self.post(0, [peer, *pack({"type": "done", "id": name, "pages": sent})])
        return True


class PageLink(Postman):
    """The decode node's end: asks, and keeps what arrives until :meth:`arrived` is called."""

    def __init__(self, endpoint: str, transport: Transport) -> None:
        super().__init__("page link")
        self.transport = transport
        self.pages: deque[tuple[str, bytes]] = deque()
        self.done: set[str] = set()
        self.add_socket(zmq.DEALER).connect(endpoint)
        self.start()

    def ask(self, name: str, tokens: Sequence[int]) -> None:
        """Have the pages of ``tokens`` sent under ``name``."""
        self.post(0, pack({"type": "prefill", "id": name, "tokens": list(tokens)}))

    def received(self, socket: int, frames: list[Part]) -> None:
        try:
            head, parts = unpack(frames)
            name = str(head["id"])
            if head["type"] == "done":
                self.done.add(name)
            elif head["type"] == "page":
                key = str(head["name"])
                body = b"".join(bytes(part) for part in self.transport.get(key, parts))
                self.transport.ack(key)
                self.pages.append((key, body))
        except (ValueError, LookupError, TypeError, StreamError):
            return  # a page that cannot be read is a page that is computed

    def tick(self) -> None:
        """Nothing is due by the clock."""

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

    ``patience`` is how many seconds a prompt waits for its pages. Prompts of less than one page are
    not asked for.
    """

    def __init__(self, core: EngineCore, link: PageLink, patience: float = 10.0) -> None:
        self.core, self.link, self.patience = core, link, patience
        self.offload = _offload(core)
        self.counts = HandoverCounts()
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count()

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or self.core.unfinished

    def submit(self, prompt: Sequence[int], params: SamplingParams, id: str | None = None) -> str:
        """As :meth:`EngineCore.submit`; an impossible prompt is refused by :meth:`step`."""
        name = f"prompt-{next(self._numbers)}" if id is None else id
        if len(prompt) <= self.core.pool.page_size:
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
            if there or now >= waiting.deadline:
                self.link.done.discard(waiting.name)
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
