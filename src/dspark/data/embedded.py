"""Conversations answered by the embedded engine, in batches of turns.

All conversations of a batch are asked their first turn, then those that go on their second, and so
on: every turn is one wide batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from dspark.data.conversation import Conversation, Maker
from dspark.data.renderer import Renderer
from dspark.decoding.request import AnswerEngine, GenerationRequest, GenerationResult

BATCH = 4096

EngineOf = Callable[[int], AnswerEngine]
"""An engine for sequences of at most so many tokens."""
OnDone = Callable[[Conversation], None]


@dataclass(frozen=True)
class Embedded:
    """Answers with the embedded engine.

    A turn that does not fit into ``max_context`` with the tokens it may generate is not asked;
    ``limits`` are narrower ones of single prompts, by id.
    """

    engine_of: EngineOf
    renderer: Renderer
    maker: Maker
    max_context: int
    reads_calls: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)

    def run(self, conversations: Iterator[Conversation], on_done: OnDone) -> dict[str, str]:
        """Bring every conversation to its end, calling ``on_done`` as each gets there."""
        while batch := list(islice(conversations, BATCH)):
            while batch:
                batch = self._turn(batch, on_done)
        return {}

    def _turn(self, batch: list[Conversation], on_done: OnDone) -> list[Conversation]:
        """Ask all of ``batch`` once; those that have more to ask."""
        asked: dict[str, Conversation] = {}
        requests: dict[str, GenerationRequest] = {}
        for conversation in batch:
            ask = conversation.ask()
            ids, name = self.renderer.prompt(ask), conversation.prompt.id
            if len(ids) + ask.params.max_new_tokens > self.limits.get(name, self.max_context):
                conversation.end("context")
                on_done(conversation)
                continue
            asked[name] = conversation
            requests[name] = GenerationRequest(name, ids, ask.params)

        def keep(result: GenerationResult) -> None:
            conversation, prompt = asked[result.id], requests[result.id].prompt_ids
            reply = self.renderer.reply(prompt, result.ids, result.finish_reason, self.maker)
            conversation.take(reply)
            if conversation.ended:
                on_done(conversation)

        if requests:
            longest = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests.values())
            self.engine_of(longest).run(list(requests.values()), keep, lambda _: None)
        return [conversation for conversation in asked.values() if not conversation.ended]
