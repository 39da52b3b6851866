"""The target's own view of a conversation: template, end-of-turn ids, ids to text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dspark.config.answers import RegenerateSection
from dspark.data.chat import Tokenizer, prompt_ids
from dspark.data.conversation import Ask, Maker, Reply
from dspark.data.reasoning import for_template, split_reasoning
from dspark.decoding.request import FinishReason


class Renderer:
    """Renders what is asked as the target is served, and reads what it wrote."""

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Collection[int], section: RegenerateSection
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.largest_id = max(tokenizer.get_vocab().values())
        self.variables: dict[str, Any] = dict(section.template_options)
        if section.effort is not None:
            self.variables["reasoning_effort"] = section.effort

    def prompt(self, ask: Ask) -> tuple[int, ...]:
        """The ids that the target must read for ``ask``. Raises as ``prompt_ids``."""
        if ask.so_far is not None:
            return ask.so_far
        messages = for_template(ask.messages)
        return tuple(prompt_ids(self.tokenizer, messages, ask.tools, self.variables))

    def written(self, ids: tuple[int, ...]) -> str:
        """Text of generated ids as it was written, marks and all, without the end of the turn."""
        own = ids[:-1] if ids and ids[-1] in self.end_ids else ids
        return str(self.tokenizer.decode(list(own), skip_special_tokens=False))

    def plain(self, ids: tuple[int, ...]) -> str:
        """Text of ids without special tokens, as servers return it."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def reply(
        self,
        prompt: tuple[int, ...],
        ids: tuple[int, ...],
        finish: FinishReason,
        maker: Maker,
    ) -> Reply:
        """A reply of which only ids are known."""
        written = self.written(ids)
        reasoning, content = split_reasoning(written)
        return Reply(prompt, ids, finish, written, content, reasoning, maker)
