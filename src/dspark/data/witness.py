"""What a server says about its answers, held against the target's own template and tokenizer.

A draft that is trained on ids which were never served looks trained and is not. So of every reply:
the prompt's ids must be those of the target's template; the text must be the text of the ids; the
counts must be the ids' counts; an answer that is said to have stopped must end with an end-of-turn
token. The first lie ends the stage and names the endpoint. Empty answers happen; an endpoint where
they are the rule is named too.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from dspark.client import Choice, Completion
from dspark.data.conversation import Ask, Maker, Reply
from dspark.data.renderer import Renderer
from dspark.errors import EndpointError
from dspark.hidden.answers import Finish

LEAST = 8
"""Answers of an endpoint before its share of empty ones is judged."""
_FINISH: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
_SERVER_FIX = (
    "Serve the target with its own chat template and tokenizer, without a limit or a filter on the "
    "answers, and run the same command: finished work is kept."
)


def no_ids(where: str, name: str) -> EndpointError:
    """The complaint about a server that cannot say which tokens it read or wrote."""
    return EndpointError(
        expected=f"{name} in the reply, since the request asks return_token_ids",
        found="none",
        where=where,
        fix="Use a server that returns token ids: vLLM 0.10.2 or later, SGLang of August 2026 or "
        "later, or dspark's own. Masks cannot be exact without them.",
    )


class Witness:
    """Turns replies into checked :class:`Reply` objects. ``revision`` is the target's, if known."""

    def __init__(self, renderer: Renderer, revision: str | None) -> None:
        self.renderer = renderer
        self.revision = revision
        self._answers: Counter[str] = Counter()
        self._empty: Counter[str] = Counter()

    def expected(self, ask: Ask) -> tuple[int, ...]:
        """The ids that the server must read."""
        return self.renderer.prompt(ask)

    def reply(self, ask: Ask, expected: tuple[int, ...], said: Completion, prompt: str) -> Reply:
        """The checked reply to ``ask`` of the prompt with the id ``prompt``.

        Raises:
            EndpointError: a lie, or no token ids; names endpoint and prompt.
        """
        where = f"endpoint {said.endpoint}, prompt {prompt}"
        choice = said.choices[0]
        ids = choice.token_ids
        if ids is None or said.prompt_ids is None:
            raise no_ids(where, "prompt_token_ids" if ids is not None else "token_ids")
        self._check_prompt(expected, said.prompt_ids, where)
        self._check_counts(said, ids, ask, where)
        finish = _FINISH[str(choice.finish_reason)]
        written = self.renderer.written(ids)
        if finish != "length":
            self._check_end(ids, choice, where)
        if ask.so_far is None:
            self._check_text(ids, choice, written, where)
        self._count(said.endpoint, empty=not written.strip())
        parsed = self.renderer.reply(expected, ids, "stop", self._maker(said))
        reasoning, content = parsed.reasoning, parsed.content
        if choice.reasoning is not None:
            reasoning, content = choice.reasoning, choice.text
        elif choice.tool_calls:
            content = choice.text
        return Reply(
            prompt_ids=said.prompt_ids,
            ids=ids,
            finish_reason=finish,
            written=written,
            content=content,
            reasoning=reasoning,
            maker=parsed.maker,
            tool_calls=choice.tool_calls,
            reasoning_tokens=None if said.usage is None else said.usage.reasoning,
        )

    def _maker(self, said: Completion) -> Maker:
        return Maker(said.model, self.revision, said.endpoint)

    def _check_prompt(self, expected: tuple[int, ...], found: tuple[int, ...], where: str) -> None:
        if found == expected:
            return
        place = next(
            (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(len(expected), len(found)),
        )
        near = slice(max(place - 4, 0), place + 4)
        decode = self.renderer.tokenizer.decode
        raise EndpointError(
            expected=f"the prompt's ids as the target's chat template makes them, at {place} of "
            f"{len(expected)}: {list(expected[near])} {decode(list(expected[near]))!r}",
            found=f"token mismatch: {len(found)} ids, there {list(found[near])} "
            f"{decode(list(found[near]))!r}",
            where=where,
            fix=_SERVER_FIX,
        )

    def _check_counts(self, said: Completion, ids: tuple[int, ...], ask: Ask, where: str) -> None:
        usage = said.usage
        if usage is not None and usage.completion != len(ids):
            self._lie(where, f"{usage.completion} generated ids, as its usage says", len(ids))
        largest = self.renderer.largest_id
        if max(ids, default=0) > largest:
            self._lie(where, f"ids of the target's tokens, at most {largest}", max(ids))
        if len(ids) > ask.params.max_new_tokens:
            self._lie(where, f"at most {ask.params.max_new_tokens} generated ids", len(ids))

    def _check_end(self, ids: tuple[int, ...], choice: Choice, where: str) -> None:
        if not ids or ids[-1] in self.renderer.end_ids or ids[-1] == choice.stop_reason:
            return
        last = f"{ids[-1]} {self.renderer.tokenizer.decode([ids[-1]])!r}"
        self._lie(
            where,
            f"an end-of-turn id (one of {sorted(self.renderer.end_ids)}) at the end of an answer "
            f"whose finish_reason is {choice.finish_reason}",
            last,
            "If the server is right, put the target's generation_config.json, which lists the ids "
            "that end its answers, beside its tokenizer; else serve without stop strings.",
        )

    def _check_text(self, ids: tuple[int, ...], choice: Choice, written: str, where: str) -> None:
        """Text and reasoning must be pieces of what the ids say, and not be left out."""
        plain = self.renderer.plain(ids)
        spelt = (_bare(written), _bare(plain))
        said = [choice.text, choice.reasoning or ""]
        for text in said if not choice.tool_calls else []:
            if not any(_bare(text) in whole for whole in spelt):
                self._lie(where, f"text that its token ids spell ({plain[:120]!r})", text[:120])
        if spelt[1] and not any(map(_bare, said)) and not choice.tool_calls:
            self._lie(where, f"the text of its token ids ({plain[:120]!r})", "an empty answer")

    def _lie(self, where: str, expected: str, found: object, fix: str = _SERVER_FIX) -> NoReturn:
        raise EndpointError(
            expected=expected, found=f"token mismatch: {found}", where=where, fix=fix
        )

    def _count(self, endpoint: str, *, empty: bool) -> None:
        self._answers[endpoint] += 1
        self._empty[endpoint] += empty
        if self._answers[endpoint] >= LEAST:
            self._judge(endpoint)

    def _judge(self, endpoint: str) -> None:
        answers, empty = self._answers[endpoint], self._empty[endpoint]
        if 2 * empty > answers:
            raise EndpointError(
                expected="answers with text in them",
                found=f"{empty} of {answers} answers are empty",
                where=f"endpoint {endpoint}",
                fix="Check that the server's model is the target and not a base model, and its "
                "template, generation config and stop tokens.",
            )

    def close(self) -> None:
        """The last word on endpoints that gave only a few answers. Raises EndpointError."""
        for endpoint in self._answers:
            self._judge(endpoint)


def _bare(text: str) -> str:
    """Without white space, which servers trim, and halves of characters, which they replace."""
    return "".join(text.replace("\ufffd", "").split())
