"""What the prompts stage asks of a tokenizer, if there is one: lengths and token ids.

With a chat template, the length of a prompt is that of the rendered conversation, as the target
will see it; without one, that of its texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dspark.data.chat import Tokenizer, prompt_ids
from dspark.data.prompt import Prompt


class Tokens(Protocol):
    """Counts, encodes and decodes; :class:`TokenizerTokens` is the real one."""

    def count(self, prompt: Prompt) -> int:
        """Length of a prompt in tokens."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text alone, without special tokens.

        What the tokenizer does not know gets a negative number of its own each time, since two
        unknown words are not the same word.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class TokenizerTokens:
    """:class:`Tokens` of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._unknown = 0

    def count(self, prompt: Prompt) -> int:
        """Length under the chat template, or of the texts if there is no template.

        Raises:
            DataError: the template refuses the turns or ignores the tools.
        """
        if prompt.input_ids is not None:
            return len(prompt.input_ids)
        if self._tokenizer.chat_template:
            return len(prompt_ids(self._tokenizer, prompt.messages, prompt.tools))
        return sum(map(len, self.encode([m["content"] for m in prompt.messages])))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        unknown = self._tokenizer.unk_token_id
        if unknown is None:
            return rows
        return [[self._new() if i == unknown else i for i in row] for row in rows]

    def _new(self) -> int:
        self._unknown -= 1
        return self._unknown

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))
