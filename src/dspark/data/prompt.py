"""One prompt: what is asked of the target, which split it belongs to, and a name that stays.

The name is a hash of what is asked, so it survives reordered sources and changed counts: answers,
captured states and bench results of two runs can be matched by it. Assistant turns never come
from a source: the target answers every prompt itself, because a draft trained on somebody else's
answers learns the wrong distribution (DSpark paper, arXiv 2607.05147, on-policy data). Of a
conversation with several user turns the first is asked; the others wait in ``later_turns``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dspark.config.prompts import Category

Split = Literal["train", "held_out"]
ROLES = ("system", "user", "assistant")


class Prompt(BaseModel):
    """A conversation that ends with a user turn, ready for the target's chat template.

    ``messages`` holds ``{"role", "content"}`` dictionaries: an optional system turn, then user and
    assistant turns in alternation, the last one a user turn. They are
    plain lists and dictionaries because chat templates take nothing else. ``tools`` are the
    functions the target may call, as its chat template takes them. ``language`` is an ISO 639 code
    (``und``: not known) and ``source`` says where the row was found.

    A row that came as token ids has ``input_ids`` and ``loss_mask`` and no messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(min_length=1)
    split: Split
    category: Category
    messages: list[dict[str, str]]
    later_turns: list[str] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    language: str = "und"
    source: str = ""
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None

    @field_validator("messages")
    @classmethod
    def _alternating(cls, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        for number, message in enumerate(messages):
            if set(message) != {"role", "content"}:
                raise ValueError(f"turn {number} has keys {sorted(message)}, not role and content")
            check_text(message["content"], f"turn {number} ({message['role']})")
        check_roles([message["role"] for message in messages])
        if messages and messages[-1]["role"] != "user":
            raise ValueError("the last turn must be the user's: there is nothing to answer")
        return messages

    @field_validator("later_turns")
    @classmethod
    def _later_turns_say_something(cls, turns: list[str]) -> list[str]:
        for number, turn in enumerate(turns):
            check_text(turn, f"later turn {number}")
        return turns

    @model_validator(mode="after")
    def _messages_or_ids(self) -> Prompt:
        if bool(self.messages) == (self.input_ids is not None):
            raise ValueError("either messages or input_ids, and not both")
        if self.input_ids is not None:
            check_mask(self.input_ids, self.loss_mask)
        return self

    @property
    def texts(self) -> list[str]:
        """Everything that is asked, turn by turn: messages, then later turns."""
        return [message["content"] for message in self.messages] + self.later_turns


def check_mask(ids: Sequence[int], mask: Sequence[int] | None) -> None:
    """Raise ``ValueError`` unless ``mask`` marks some, but not all, of ``ids``."""
    if mask is None or len(mask) != len(ids):
        found = "none" if mask is None else str(len(mask))
        raise ValueError(
            f"loss_mask must hold one number for each of {len(ids)} ids, found {found}"
        )
    if not set(mask) <= {0, 1}:
        raise ValueError("loss_mask must hold 0 and 1 only")
    if sum(mask) in {0, len(mask)}:
        share = "nothing" if not sum(mask) else "everything, the prompt too"
        raise ValueError(f"loss_mask marks {share} as the target's own")
    if any(i < 0 for i in ids):
        raise ValueError("input_ids holds a negative id")


def check_text(text: str, where: str) -> None:
    """Raise ``ValueError`` when a turn is blank or cannot be written as UTF-8."""
    if not text.strip():
        raise ValueError(f"{where} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half a surrogate pair at character {error.start}"
        ) from None


def check_roles(roles: Sequence[str]) -> None:
    """Raise ``ValueError`` unless roles are [system,] user, assistant, user, assistant..."""
    for number, role in enumerate(roles):
        if role not in ROLES:
            raise ValueError(f"turn {number} has role {role!r}; known roles are {', '.join(ROLES)}")
    spoken = list(roles[1:] if roles and roles[0] == "system" else roles)
    for number, role in enumerate(spoken):
        wanted = ("user", "assistant")[number % 2]
        if role != wanted:
            turn = number + len(roles) - len(spoken)
            raise ValueError(f"roles must alternate: turn {turn} is {role!r}, expected {wanted!r}")


def make_prompt(
    split: Split,
    category: str,
    user_turns: Sequence[str],
    system: str | None = None,
    examples: Sequence[tuple[str, str]] = (),
    *,
    tools: Sequence[dict[str, Any]] = (),
    language: str = "und",
    source: str = "",
) -> Prompt:
    """A prompt that asks the first of ``user_turns``; its id hashes everything that is in it.

    ``examples`` are worked (user, assistant) turns that come before the question. ``language`` and
    ``source`` say where it comes from and are no part of the id.

    Raises:
        pydantic.ValidationError: no turn, an empty turn or a malformed category.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in examples:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages += [{"role": "user", "content": turn} for turn in user_turns[:1]]
    later = list(user_turns[1:])
    # ensure_ascii keeps the hash defined for text that the validators are about to refuse.
    asked: list[Any] = [messages, later, list(tools)] if tools else [messages, later]
    return Prompt(
        id=prompt_id(category, split, asked),
        split=split,
        category=category,
        messages=messages,
        later_turns=later,
        tools=list(tools),
        language=language,
        source=source,
    )


def tokenised_prompt(
    split: Split, category: str, ids: list[int], mask: list[int], source: str
) -> Prompt:
    """A row that is token ids already, kept as it is.

    Raises:
        pydantic.ValidationError: see :func:`check_mask`.
    """
    return Prompt(
        id=prompt_id(category, split, [ids, mask]),
        split=split,
        category=category,
        messages=[],
        source=source,
        input_ids=ids,
        loss_mask=mask,
    )


def prompt_id(category: str, split: Split, asked: Any) -> str:
    """Category, split and 64 bits of the sha256 of what is asked."""
    text = json.dumps(asked, ensure_ascii=True, separators=(",", ":"))
    return f"{category}-{split}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def first_problem(error: ValidationError) -> str:
    """The first complaint of a validation error as one short phrase."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
