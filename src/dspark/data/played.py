"""Conversations that a teacher plays while a draft trains: every user turn, as regenerate does.

A stream's row becomes one record. As long as the template keeps the past as the target wrote it, a
conversation is one sequence, and that is the record. Where the template rewrites the past (it drops
old reasoning), the conversation falls apart into several sequences; the record is then the one with
the most trained tokens, and the others are counted as left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dspark.config.answers import RegenerateSection
from dspark.data.conversation import Conversation, Maker, answer_seed
from dspark.data.embedded import Embedded, EngineOf
from dspark.data.prompt import Prompt
from dspark.data.renderer import Renderer
from dspark.hidden.answers import Answer
from dspark.hidden.rows import Row

TEMPLATE = 64  # tokens that a turn may cost beside its text: role marks and the like


def prompt_row(
    prompt: Prompt, section: RegenerateSection, renderer: Renderer, max_context: int
) -> Row:
    """What a teacher is asked for ``prompt``; ``max_context`` bounds the whole conversation.

    One answer to one question is generated from ids alone; whatever needs more than that (later
    turns, cut answers that go on) travels as the prompt itself and is played.
    """
    first = Conversation(prompt, section, reads_calls=False)
    ask = first.ask()
    ids = renderer.prompt(ask)
    row = Row(
        prompt.id,
        prompt.category,
        first.temperature,
        ids,
        len(ids),
        section.max_new_tokens,
        answer_seed(prompt.id),
        section.top_p,
    )
    parts = 1 + (section.continuations if section.on_length == "continue" else 0)
    if not first.questions and parts == 1:
        return row
    later = sum(len(renderer.tokenizer.encode(q)) + TEMPLATE for q in first.questions)
    answers = section.max_new_tokens * parts * (1 + len(first.questions))
    most = min(max_context, len(ids) + later + answers)
    most = max(most, len(ids) + section.max_new_tokens)
    return Row(**{**vars(row), "most": most, "asked": prompt.model_dump_json()})


class Played:
    """Plays rows with the embedded engine, turn by turn, all rows of a group together.

    ``tally`` counts how turns ended and what was left out.
    """

    def __init__(
        self, engine_of: EngineOf, renderer: Renderer, section: RegenerateSection, maker: Maker
    ) -> None:
        self.engine_of, self.renderer = engine_of, renderer
        self.section, self.maker = section, maker
        self.tally: Counter[str] = Counter()

    def play(self, rows: Sequence[Row]) -> list[Answer | None]:
        """The sequence to train on of every row, None where nothing came of it.

        Raises:
            DataError: a prompt that its template refuses.
        """
        conversations = [
            Conversation(Prompt.model_validate_json(row.asked), self.section, reads_calls=False)
            for row in rows
        ]
        limits = {c.prompt.id: row.most for c, row in zip(conversations, rows, strict=True)}
        embedded = Embedded(
            self.engine_of, self.renderer, self.maker, max(limits.values()), limits=limits
        )
        embedded.run(iter(conversations), lambda _: None)
        return [self._longest(c) for c in conversations]

    def _longest(self, conversation: Conversation) -> Answer | None:
        parts = conversation.rows()
        self.tally.update(conversation.tally)
        if not parts:
            return None
        longest = max(parts, key=lambda answer: answer.trained)
        self.tally["sequences left out"] += len(parts) - 1
        return longest.model_copy(update={"id": conversation.prompt.id})
