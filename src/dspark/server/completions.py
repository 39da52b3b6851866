"""``/v1/completions``: texts and ids continued, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dspark.decoding.params import SamplingParams
from dspark.server.choice import Piece, joined, stop_reason, token_kinds
from dspark.server.envelope import Envelope
from dspark.server.errors import bad_request
from dspark.server.protocol import CompletionRequest
from dspark.server.sampling import grammar_of, sampling_params
from dspark.server.service import Event, Result, Service, Usage

DEFAULT_TOKENS = 16


@dataclass
class Completions:
    """One request: its prompts as ids and texts, its parameters, and how to render pieces."""

    service: Service
    body: CompletionRequest
    prompts: list[list[int]] = field(default_factory=list)
    echoes: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.envelope = Envelope(self.service, self.body, "cmpl")

    @classmethod
    async def of(cls, service: Service, body: CompletionRequest) -> Completions:
        """Encode and check everything.

        Raises:
            APIError, DecodingError: what cannot be answered.
        """
        made = cls(service, body)
        given = body.prompt
        alone = isinstance(given, str) or not given or isinstance(given[0], int)
        grammar = grammar_of(body.response_format, body.structured_outputs)
        for prompt in [given] if alone else given:
            if isinstance(prompt, str):
                ids = await service.encode(prompt, special=body.add_special_tokens)
                text = prompt
            else:
                ids = [int(i) for i in prompt]  # type: ignore[union-attr, arg-type]
                service.check_ids(ids)
                text = service.engine.decode(ids) if body.echo else ""
            made.prompts.append(ids)
            made.echoes.append(text if body.echo else "")
            made.params.append(
                sampling_params(
                    body,
                    max_tokens=DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
                    room=service.room(ids),
                    logprobs=body.logprobs,
                    grammar=grammar,
                )
            )
        if not made.prompts:
            raise bad_request("prompt must not be an empty list.", "prompt")
        return made

    def events(self) -> AsyncIterator[Event]:
        """The service's events for it."""
        return self.service.run(self.prompts, self.params, eager=bool(self.body.stream))

    async def stream(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Server-sent events of all pieces."""
        chunks = self.envelope.chunks("text_completion")
        begun: set[tuple[int, int]] = set()
        async for item in events:
            if isinstance(item, Result):
                yield chunks.last(item)
                continue
            out = []
            for piece in item:
                self.tokens += len(piece.delta.ids)
                first = (piece.prompt, piece.index) not in begun
                begun.add((piece.prompt, piece.index))
                out.append(chunks.chunk(self._choice(piece, first=first), self._usage_so_far()))
            yield b"".join(out)

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The response that is not streamed: its pieces, joined."""
        pieces: dict[int, list[Piece]] = {}
        async for item in events:
            if isinstance(item, Result):
                every = [joined(pieces[index]) for index in sorted(pieces)]
                return self.envelope.around(
                    "text_completion", [self._choice(p, first=True) for p in every], item
                )
            for piece in item:
                pieces.setdefault(self._index(piece), []).append(piece)
        raise AssertionError("events end with the result")

    def _index(self, piece: Piece) -> int:
        return piece.prompt * self.params[0].n + piece.index

    def _choice(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        echo = self.echoes[piece.prompt]
        ends = self.service.engine.core.end_ids
        choice: dict[str, Any] = {
            "index": self._index(piece),
            "text": (echo if first else "") + piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": stop_reason(piece.delta, ends),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(piece.delta.ids)
            if first:
                choice["prompt_token_ids"] = self.prompts[piece.prompt]
        if self.body.return_token_kinds:
            choice["dspark"] = token_kinds(piece, self.service.texts)
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        texts = self.envelope.name
        top: list[dict[str, float]] = []
        for entry in piece.logprobs:
            named = {texts(token): value for token, value in reversed(entry.top)}
            named.setdefault(texts(entry.token), entry.logprob)
            top.append(named)
        return {
            "tokens": [texts(entry.token) for entry in piece.logprobs],
            "token_logprobs": [entry.logprob for entry in piece.logprobs],
            "top_logprobs": top,
            "text_offset": list(piece.places),
        }

    def _usage_so_far(self) -> Usage:
        return Usage(self.prompt_tokens, 0, self.tokens)

    @cached_property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))
