"""Small prompt sets and their answers, for the tests of regenerate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.artifacts.progress import OnDone, untold
from dspark.client import Endpoint
from dspark.config.answers import RegenerateSection
from dspark.data.answer_report import AnswerReport
from dspark.data.prompt import Prompt, make_prompt
from dspark.data.regenerate import Answerer, regenerate
from dspark.data.renderer import Renderer
from dspark.data.served import Served
from dspark.data.witness import Witness
from dspark.hidden.answers import Answer, read_answers


def section_of(*urls: str, **settings: Any) -> RegenerateSection:
    endpoints = [{"url": url, "concurrency": 4} for url in urls]
    return RegenerateSection(endpoints=endpoints, attempts=2, **settings)


def asked(*conversations: Sequence[str], **more: Any) -> list[Prompt]:
    """One prompt for each sequence of user turns."""
    return [make_prompt("train", "chat", list(turns), **more) for turns in conversations]


def served(tokenizer: Any, section: RegenerateSection, ends: Sequence[int] = ()) -> Served:
    endpoints = tuple(Endpoint(e.url, e.model, None, e.concurrency) for e in section.endpoints)
    renderer = Renderer(tokenizer, ends or [tokenizer.eos_token_id], section)
    return Served(endpoints, section, Witness(renderer, "r1"))


def answers_of(
    prompts: list[Prompt],
    answering: Answerer,
    section: RegenerateSection,
    folder: Path,
    on_answer: OnDone = untold,
) -> tuple[list[Answer], AnswerReport]:
    folder.mkdir(parents=True, exist_ok=True)
    report = regenerate(lambda: prompts, answering, section, folder, on_answer)
    return read_answers(folder), report


def marked(row: Answer, tokenizer: Any) -> str:
    """The row's text, with what is trained on between brackets."""
    text, before = "", 0
    for token, trained in zip([*row.ids, None], [*row.loss_mask, 0], strict=True):
        if trained != before:
            text += "⟦" if trained else "⟧"
        before = trained
        if token is not None:
            text += tokenizer.decode([token], skip_special_tokens=False)
    return text
