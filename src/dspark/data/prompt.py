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
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dspark.config.recipe import Category

Split = Literal["train", "held_out"]
ROLES = ("system", "user", "assistant")


class Prompt(BaseModel):
    """A conversation that ends with a user turn, ready for the target's chat template.

    ``messages`` holds ``{"role", "content"}`` dictionaries: an optional system turn, then user and
    assistant turns in alternation, the last one a user turn. They are
    plain lists and dictionaries because chat templates take nothing else.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(min_length=1)
    split: Split
    category: Category
    messages: list[dict[str, str]] = Field(min_length=1)
    later_turns: list[str] = Field(default_factory=list)

    @field_validator("messages")
    @classmethod
    def _alternating(cls, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        for number, message in enumerate(messages):
            if set(message) != {"role", "content"}:
                raise ValueError(f"turn {number} has keys {sorted(message)}, not role and content")
            check_text(message["content"], f"turn {number} ({message['role']})")
        check_roles([message["role"] for message in messages])
        if messages[-1]["role"] != "user":
            raise ValueError("the last turn must be the user's: there is nothing to answer")
        return messages

    @field_validator("later_turns")
    @classmethod
    def _later_turns_say_something(cls, turns: list[str]) -> list[str]:
        for number, turn in enumerate(turns):
            check_text(turn, f"later turn {number}")
        return turns


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
) -> Prompt:
    """A prompt that asks the first of ``user_turns``; its id hashes everything that is in it.

    ``examples`` are worked (user, assistant) turns that come before the question.

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
    text = json.dumps([messages, later], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Prompt(
        id=f"{category}-{split}-{digest}",
        split=split,
        category=category,
        messages=messages,
        later_turns=later,
    )


def first_problem(error: ValidationError) -> str:
    """The first complaint of a validation error as one short phrase."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
