"""A server as a :class:`Player`: streamed chat requests and whatever it tells about drafting.

Per answer, in this order: our server's own field, vLLM's ``metrics.speculative_decoding`` (with
``--per-request-spec-decode-metrics``), and, when requests go one by one, the difference of the
server's counters around the answer. Otherwise only totals over a whole arm are left.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from dspark.bench.play.counters import (
    difference,
    foreign_traffic,
    parse_metrics,
    parse_mtp_stats,
)
from dspark.bench.play.turn import Accepted, Answer, Ask, Counters, Where
from dspark.client import Chunk, Client, Endpoint, Usage
from dspark.errors import EndpointError

# Fields of a request beyond OpenAI's: token ids (vLLM, ours), acceptance (ours), thinking (vLLM,
# SGLang).
WISHES = ("return_token_ids", "return_acceptance", "chat_template_kwargs")
# Template variables by which models are told to think; a template ignores those it does not know.
_THINKING = ("enable_thinking", "thinking")


class HttpPlayer:
    """``one_by_one``: nobody else asks meanwhile, so counters around an answer are its own."""

    def __init__(self, client: Client, endpoint: Endpoint, *, one_by_one: bool) -> None:
        self.client, self.endpoint, self.one_by_one = client, endpoint, one_by_one
        self._paths: list[str] | None = None
        # Strict servers refuse what they do not know: then these are left out.
        self.wishes: tuple[str, ...] = WISHES
        self._understood = False

    @property
    def gone(self) -> str | None:
        return self.client.lost.get(self.endpoint.url)

    async def counters(self) -> Counters | None:
        """Totals from ``/metrics``, else from ``/debug/mtp_stats``; None where neither has any."""
        readers = {"/metrics": self._metrics, "/debug/mtp_stats": parse_mtp_stats}
        for path in readers if self._paths is None else self._paths:
            try:
                found = readers[path](await self.client.get_text(self.endpoint, path))
            except EndpointError:
                continue
            if found is not None:
                self._paths = [path]
                return found
        self._paths = self._paths or []
        return None

    def _metrics(self, text: str) -> Counters | None:
        return parse_metrics(text, self.client.models.get(self.endpoint.url))

    async def answer(self, ask: Ask) -> Answer:
        """One streamed answer.

        Raises:
            EndpointError: refused, malformed, broken off, or the server is gone.
        """
        before = await self.counters() if self.one_by_one and self._paths else None
        start = time.monotonic()
        while True:
            try:
                parts = await self._streamed(ask)
                break
            except EndpointError as error:
                self._wish_less(error)
                start = time.monotonic()
        self._understood = True
        seconds = time.monotonic() - start
        if parts.finish is None:
            raise _broken(self.endpoint, "an end with a finish reason", "none")
        if parts.usage is None and parts.ids is None:
            raise _broken(self.endpoint, "usage or token ids", "neither: tokens cannot be counted")
        tokens = parts.usage.completion if parts.usage else len(parts.ids or ())
        accepted, source = accepted_of(parts.extra)
        if accepted is None and before is not None:
            accepted, source = await self._around(before, tokens)
        return Answer(
            text="".join(parts.text),
            reasoning="".join(parts.reasoning),
            ids=None if parts.ids is None else tuple(parts.ids),
            tokens=tokens,
            prompt_tokens=parts.usage.prompt if parts.usage else None,
            finish=parts.finish,
            first=None if parts.first is None else max(0.0, parts.first - start),
            seconds=seconds,
            accepted=accepted,
            source=source,
        )

    def _wish_less(self, error: EndpointError) -> None:
        """Leave out the fields that a refusal names, or all; raise where it is about others."""
        refused = error.status is not None and 400 <= error.status < 500
        if self._understood or not self.wishes or not refused:
            raise error
        named = [name for name in self.wishes if name in error.found] or list(self.wishes)
        self.wishes = tuple(name for name in self.wishes if name not in named)

    @property
    def notices(self) -> list[str]:
        """What the server could not be asked for."""
        if "chat_template_kwargs" in self.wishes:
            return []
        return ["The server takes no switch for thinking: its template's default was used."]

    async def _streamed(self, ask: Ask) -> _Parts:
        parts = _Parts()
        body = _body(ask, self.wishes)
        stream = self.client.stream("chat", body, endpoint=self.endpoint)
        # A generator: left early (a timeout), it must close its connection now, not some day.
        async with aclosing(cast(AsyncGenerator[Chunk, None], stream)) as chunks:
            async for chunk in chunks:
                parts.take(chunk)
        return parts

    async def _around(self, before: Counters, tokens: int) -> tuple[Accepted | None, Where]:
        after = await self.counters()
        moved = None if after is None else difference(before, after)
        if moved is None:
            return None, "none"
        block = -(-moved.accepted.drafted // max(1, moved.accepted.steps))
        if foreign_traffic(moved, 1, tokens, block) is not None:
            return None, "none"
        return moved.accepted, moved.source


class _Parts:
    """What the pieces of one stream add up to."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.ids: list[int] | None = []
        self.finish: str | None = None
        self.first: float | None = None
        self.usage: Usage | None = None
        self.extra: dict[str, Any] = {}

    def take(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.extra.update(chunk.extra)
        choice = chunk.choice
        if choice is None:
            return
        if choice.text or choice.reasoning or choice.token_ids:
            if self.first is None:
                self.first = chunk.at
            self.text.append(choice.text)
            self.reasoning.append(choice.reasoning or "")
            if choice.token_ids is None:
                self.ids = None
            elif self.ids is not None:
                self.ids.extend(choice.token_ids)
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason


def accepted_of(extra: Mapping[str, Any]) -> tuple[Accepted | None, Where]:
    """Acceptance from the fields of a reply that are no part of OpenAI's protocol.

    A field of an unknown shape counts as absent: these fields are young and change.
    """
    metrics = extra.get("metrics")
    vllm = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    own = extra.get("dspark")
    candidates: list[tuple[Any, Where]] = [
        (own.get("acceptance") if isinstance(own, Mapping) else None, "dspark"),
        (vllm, "vllm-request"),
    ]
    for raw, source in candidates:
        if not isinstance(raw, Mapping):
            continue
        try:
            return (_own(raw) if source == "dspark" else _vllm(raw)), source
        except (KeyError, TypeError, ValueError):
            continue
    return None, "none"


def _own(raw: Mapping[str, Any]) -> Accepted:
    return Accepted(
        steps=raw["steps"],
        drafted=raw["drafted"],
        admitted=raw["admitted"],
        accepted=raw["accepted"],
        accepted_at=raw.get("accepted_per_position"),
        admitted_at=raw.get("admitted_per_position"),
    )


def _vllm(raw: Mapping[str, Any]) -> Accepted:
    histogram = raw.get("acceptance_histogram")
    if isinstance(histogram, Mapping):
        spread = {int(n): int(count) for n, count in histogram.items()}
    else:
        spread = {n: int(count) for n, count in enumerate(histogram or ())}
    slots = max(int(raw.get("num_spec_tokens") or 0), max(spread, default=0))
    at = tuple(sum(c for n, c in spread.items() if n > slot) for slot in range(slots))
    per_step = raw.get("per_step_accepted")
    return Accepted(
        steps=int(raw["num_spec_steps"]),
        drafted=int(raw["num_draft_tokens"]),
        accepted=int(raw["num_accepted_draft_tokens"]),
        accepted_at=at if spread else None,
        per_step=None if per_step is None else tuple(int(n) for n in per_step),
    )


def _body(ask: Ask, wishes: tuple[str, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [dict(message) for message in ask.messages],
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
    }
    body |= {name: True for name in wishes if name != "chat_template_kwargs"}
    if ask.thinking != "default" and "chat_template_kwargs" in wishes:
        body["chat_template_kwargs"] = dict.fromkeys(_THINKING, ask.thinking == "on")
    return body


def _broken(endpoint: Endpoint, expected: str, found: str) -> EndpointError:
    return EndpointError(
        expected=expected,
        found=found,
        where=f"endpoint {endpoint.url}",
        fix="Check the server's log, and that it is OpenAI-compatible.",
    )
