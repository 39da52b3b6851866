"""``/v1/chat/completions``: conversations, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from dspark.data.chat import Ending
from dspark.decoding.params import SamplingParams
from dspark.engine.request import TokenLogprob
from dspark.server.choice import Piece, joined, stop_reason, token_kinds
from dspark.server.envelope import Envelope
from dspark.server.errors import bad_request
from dspark.server.protocol import ChatRequest
from dspark.server.sampling import grammar_of, sampling_params
from dspark.server.service import Event, Result, Service, Usage
from dspark.server.tools import Call, CallFinder, ToolPlan, forced_calls, plan_tools, turns


@dataclass
class Chat:
    """One request: its prompt as ids, its parameters, its tools, and how to render pieces."""

    service: Service
    body: ChatRequest
    tools: ToolPlan
    prompt: list[int]
    params: SamplingParams
    tokens: int = 0

    def __post_init__(self) -> None:
        self.envelope = Envelope(self.service, self.body, "chatcmpl")

    @classmethod
    async def of(cls, service: Service, body: ChatRequest) -> Chat:
        """Render the template and check everything.

        Raises:
            APIError, DecodingError, TargetError: what cannot be answered.
        """
        tools = plan_tools(body, service.template)
        try:
            messages = turns(body.messages)
        except ValueError as error:
            raise bad_request(
                f"arguments of a past tool call are not JSON: {error}", "messages"
            ) from error
        ids = await service.encode_chat(
            messages, tools.shown, template_variables(body), _ending(body)
        )
        asked = body.max_completion_tokens
        params = sampling_params(
            body,
            max_tokens=body.max_tokens if asked is None else asked,
            room=service.room(ids),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=tools.grammar or grammar_of(body.response_format, body.structured_outputs),
        )
        return cls(service, body, tools, ids, params)

    def events(self) -> AsyncIterator[Event]:
        """The service's events for it."""
        return self.service.run([self.prompt], [self.params], eager=bool(self.body.stream))

    async def stream(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Server-sent events of all pieces."""
        chunks = self.envelope.chunks("chat.completion.chunk")
        turns = [_Turn(self) for _ in range(self.params.n)]
        async for item in events:
            if isinstance(item, Result):
                yield chunks.last(item)
                continue
            out = []
            for piece in item:
                self.tokens += len(piece.delta.ids)
                choice = turns[piece.index].take(piece)
                out.append(chunks.chunk(choice, Usage(len(self.prompt), 0, self.tokens)))
            yield b"".join(out)

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The response that is not streamed: its pieces, joined."""
        pieces: list[list[Piece]] = [[] for _ in range(self.params.n)]
        async for item in events:
            if isinstance(item, Result):
                choices = [_Turn(self).take(joined(own)) for own in pieces]
                return self.envelope.around("chat.completion", [_message(c) for c in choices], item)
            for piece in item:
                pieces[piece.index].append(piece)
        raise AssertionError("events end with the result")

    def logprobs(self, entries: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        """OpenAI's ``logprobs`` of a choice."""
        if not self.body.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.service.texts(token)
        # A token that is half a character has no text of its own to give the bytes of.
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": self.envelope.name(token), "logprob": logprob, "bytes": whole}


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """What the template is given beside messages and tools, as vLLM does it.

    An effort also says whether to think at all: templates know one or the other.
    """
    found = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        found.setdefault("enable_thinking", body.reasoning_effort != "none")
        found["reasoning_effort"] = body.reasoning_effort
    if body.documents is not None:
        found["documents"] = body.documents
    return found


def _ending(body: ChatRequest) -> Ending:
    if body.continue_final_message:
        return "open"
    return "closed" if body.add_generation_prompt is False else "answer"


class _Turn:
    """One answer of a chat: turns pieces into chunk choices, tool calls found on the way."""

    def __init__(self, chat: Chat) -> None:
        self._chat, self._mode = chat, chat.tools.mode
        self._finder = CallFinder(chat.tools.names) if self._mode == "auto" else None
        self._text = ""
        self._calls = 0
        self._begun = False

    def take(self, piece: Piece) -> dict[str, Any]:
        """The choice of one chunk."""
        chat = self._chat
        final = piece.finish_reason is not None
        delta = self._delta(piece.text, final=final)
        if not self._begun:
            delta = {"role": "assistant", **({"content": ""} if len(delta) == 0 else {}), **delta}
            first, self._begun = True, True
        else:
            first = False
        called = final and piece.finish_reason == "stop" and self._calls > 0
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": delta,
            "logprobs": chat.logprobs(piece.logprobs),
            "finish_reason": "tool_calls" if called else piece.finish_reason,
            "stop_reason": stop_reason(piece.delta, chat.service.engine.core.end_ids),
        }
        if chat.body.return_token_ids:
            choice["token_ids"] = list(piece.delta.ids)
            if first:
                choice["prompt_token_ids"] = chat.prompt
        if chat.body.return_token_kinds:
            choice["dspark"] = token_kinds(piece, chat.service.texts)
        return choice

    def _delta(self, text: str, *, final: bool) -> dict[str, Any]:
        if self._mode == "named":
            return self._named(text)
        if self._mode == "required":
            self._text += text
            calls = forced_calls(self._text) if final else []
            # Cut off by the limit: what there is, as text, instead of a call nobody can parse.
            return {"content": self._text} if calls is None else self._called("", calls)
        if self._finder is not None:
            return self._called(*self._finder.feed(text, final=final))
        return {"content": text} if text else {}

    def _named(self, text: str) -> dict[str, Any]:
        if not text:
            return {}
        part: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if not self._calls:
            call = Call(self._chat.tools.name, text)
            part = {"index": 0, **call.as_json()}
            self._calls = 1
        return {"tool_calls": [part]}

    def _called(self, content: str, calls: list[Call]) -> dict[str, Any]:
        out: dict[str, Any] = {"content": content} if content else {}
        if calls:
            numbered = enumerate(calls, self._calls)
            out["tool_calls"] = [{"index": i, **call.as_json()} for i, call in numbered]
            self._calls += len(calls)
        return out


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice that is not streamed."""
    delta = choice.pop("delta")
    calls = delta.get("tool_calls")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": delta.get("content") or (None if calls else ""),
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
    return {"index": choice.pop("index"), "message": message, **choice}
