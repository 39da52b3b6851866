"""Conversations answered by OpenAI-compatible servers.

As many conversations are under way as the endpoints take together. Every reply is held against what
the target's own template and tokenizer say (:mod:`dspark.data.witness`) before it becomes a row.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.client import Client, Completion, Endpoint, ModelInfo, Retry, Timeouts
from dspark.config.answers import EndpointSection, RegenerateSection
from dspark.data.conversation import Ask, Conversation
from dspark.data.witness import Witness, no_ids
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import GenerationRequest, GenerationResult
from dspark.errors import ConfigError, DSparkError, EndpointError


@dataclass(frozen=True)
class Served:
    """Answers through ``endpoints``, each reply checked by ``witness``."""

    endpoints: tuple[Endpoint, ...]
    section: RegenerateSection
    witness: Witness
    reads_calls: bool = True

    def run(
        self,
        conversations: Iterator[Conversation],
        on_done: Callable[[Conversation], None],
    ) -> dict[str, str]:
        """Bring every conversation to its end, calling ``on_done`` as each gets there.

        Returns:
            endpoints that were lost on the way, with the reason; others took over.

        Raises:
            EndpointError: an endpoint is not there when the work begins, does not tell the truth,
                or none is left. Conversations that are done stay done.
        """
        work = _Work(conversations, self.section, self.witness, on_done)
        try:
            return asyncio.run(work.run(self.endpoints))
        except BaseExceptionGroup as group:
            raise _first(group) from group


def endpoints_of(section: RegenerateSection) -> tuple[Endpoint, ...]:
    """The section's endpoints, with their keys from the environment.

    Raises:
        ConfigError: a variable that is not set, or a url that is none.
    """
    return tuple(Endpoint(e.url, e.model, _key(e), e.concurrency) for e in section.endpoints)


def _key(endpoint: EndpointSection) -> str | None:
    if endpoint.api_key_env is None:
        return None
    if key := os.environ.get(endpoint.api_key_env):
        return key
    raise ConfigError(
        expected=f"the environment variable {endpoint.api_key_env} with the key of {endpoint.url}",
        found="it is not set",
        where="regenerate.endpoints",
        fix=f"export {endpoint.api_key_env}=..., or remove api_key_env.",
    )


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The error that tells the user what to do, of all that ended together."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((e for e in found if isinstance(e, DSparkError)), found[0])


def write_served(
    endpoints: tuple[Endpoint, ...],
    section: RegenerateSection,
    requests: Sequence[GenerationRequest],
    stop_ids: Collection[int],
    on_result: Callable[[GenerationResult], None],
) -> None:
    """Have servers continue the ids of each request until one of ``stop_ids``.

    Raises:
        EndpointError: an endpoint is not there, sends no token ids, or none is left.
    """

    async def one(client: Client, request: GenerationRequest) -> None:
        body = {
            "prompt": list(request.prompt_ids),
            "stop_token_ids": sorted(stop_ids),
            **_sampling(request.params),
        }
        said = await client.request("completion", body)
        ids = said.choices[0].token_ids
        if ids is None:
            raise no_ids(f"endpoint {said.endpoint}", "token_ids")
        stopped = bool(ids) and ids[-1] in stop_ids
        on_result(GenerationResult(request.id, ids, "stop" if stopped else "length"))

    async def run() -> None:
        retry, timeouts = Retry(attempts=section.attempts), Timeouts(read=section.timeout)
        async with Client(endpoints, retry=retry, timeouts=timeouts) as client:
            await client.connect()
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(one(client, request))

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise _first(group) from group


class _Work:
    def __init__(
        self,
        conversations: Iterator[Conversation],
        section: RegenerateSection,
        witness: Witness,
        on_done: Callable[[Conversation], None],
    ) -> None:
        self.conversations, self.section = conversations, section
        self.witness, self.on_done = witness, on_done
        self.length: int | None = None

    async def run(self, endpoints: tuple[Endpoint, ...]) -> dict[str, str]:
        retry = Retry(attempts=self.section.attempts)
        timeouts = Timeouts(read=self.section.timeout)
        async with Client(endpoints, retry=retry, timeouts=timeouts) as client:
            served = await client.connect()
            lengths = [info.length for info in served.values() if info.length]
            self.length = min(lengths, default=None)
            workers = sum(endpoint.concurrency for endpoint in endpoints)
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._worker(client))
            await self._same_models(client, served)
            self.witness.close()
            return dict(client.lost)

    async def _worker(self, client: Client) -> None:
        for conversation in self.conversations:
            while not conversation.ended:
                await self._turn(client, conversation)
            self.on_done(conversation)

    async def _turn(self, client: Client, conversation: Conversation) -> None:
        ask = conversation.ask()
        expected = self.witness.expected(ask)
        new_tokens = ask.params.max_new_tokens
        if self.length is not None and len(expected) + new_tokens > self.length:
            conversation.end("context")
            return
        try:
            if ask.so_far is None:
                reply = await client.request("chat", self._chat(ask))
            else:
                body = {"prompt": list(ask.so_far), **_sampling(ask.params)}
                reply = await client.request("completion", body)
        except EndpointError as error:
            if not _too_long(error):
                raise
            conversation.end("context")
            return
        self._check_model(client, reply)
        finish = reply.choices[0].finish_reason
        if finish not in {"stop", "length", "tool_calls", "function_call"}:
            conversation.tally[f"finish {finish}"] += 1
            conversation.end(f"finish {finish}")
            return
        conversation.take(self.witness.reply(ask, expected, reply, conversation.prompt.id))

    def _chat(self, ask: Ask) -> dict[str, Any]:
        body = {"messages": ask.messages, **_sampling(ask.params)}
        if ask.tools:
            body["tools"] = ask.tools
        if self.section.effort is not None:
            body["reasoning_effort"] = self.section.effort
        if self.witness.renderer.variables:
            body["chat_template_kwargs"] = self.witness.renderer.variables
        return body

    def _check_model(self, client: Client, reply: Completion) -> None:
        asked = client.models[reply.endpoint]
        if reply.model and reply.model != asked:
            raise _changed(reply.endpoint, f"answers of the model {asked}", reply.model)

    async def _same_models(self, client: Client, served: dict[str, ModelInfo]) -> None:
        """Nobody put another model behind a name while we asked."""
        for endpoint in client.pool.live():
            now = {info.id: info for info in await client.served(endpoint)}
            before = served[endpoint.url]
            if now.get(before.id) != before:
                raise _changed(endpoint.url, f"{before} to the end", str(now.get(before.id)))


def _too_long(error: EndpointError) -> bool:
    """Whether a server that does not tell its context length refused a prompt for it."""
    said = error.found.lower()
    return error.status in {400, 413, 422} and (
        "context length" in said or "context window" in said or "maximum context" in said
    )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "max_tokens": params.max_new_tokens,
        "seed": params.seed,
        "return_token_ids": True,
    }
    if params.top_p < 1:
        body["top_p"] = params.top_p
    return body


def _changed(url: str, expected: str, found: str) -> EndpointError:
    return EndpointError(
        expected=expected,
        found=found,
        where=f"endpoint {url}",
        fix="Serve the target alone under its name, and run the same command: what was finished "
        "before is kept; if other answers may have slipped in, remove the answers folder first.",
    )
