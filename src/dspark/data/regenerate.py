"""On-policy answers: the target answers the training prompts itself.

A draft learns the target's distribution on the target's own text, so answers written by people or
by another model would teach it contexts that serving never shows. Who answers is handed in (the
embedded engine or servers); this stage decides seeds and temperatures, keeps what is finished
across interruptions, and counts how answers ended (truncated ones are reported, never hidden).

What a prompt is asked with depends on its id and the recipe alone. So a stage that was killed
anywhere ends with the very rows of an undisturbed one, in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from dspark.artifacts.progress import OnDone, untold
from dspark.config.answers import RegenerateSection
from dspark.data.answer_journal import UNFINISHED, Journal
from dspark.data.answer_report import AnswerAccount, AnswerReport, write_answer_report
from dspark.data.conversation import Conversation
from dspark.data.prompt import Prompt
from dspark.data.shards import ShardWriter
from dspark.errors import DataError
from dspark.hidden.answers import SHARD_NAME

Prompts = Callable[[], Iterable[Prompt]]
"""The prompts, in their order, as often as they are wanted."""


class Answerer(Protocol):
    """Brings conversations to their end and calls back for each; returns endpoints it lost."""

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls come apart from the text."""

    def run(
        self, conversations: Iterator[Conversation], on_done: Callable[[Conversation], None]
    ) -> dict[str, str]: ...


def regenerate(
    prompts: Prompts,
    answering: Answerer,
    section: RegenerateSection,
    folder: Path,
    on_answer: OnDone = untold,
) -> AnswerReport:
    """Answer ``prompts`` and write ``shards/answers-*.jsonl``, ``report.json`` and ``report.html``.

    Conversations an interrupted run had finished are read back from ``unfinished.jsonl`` and not
    made again; the caller removes that file when the stage is sealed. ``on_answer`` gets the number
    of prompts that became ready.

    Raises:
        DataError: no prompts, nothing to train on, or a mask over everything.
        EndpointError: see :mod:`dspark.data.served`.
    """
    journal = Journal(folder)
    try:
        lost = _answer_missing(prompts, answering, section, journal, on_answer)
        return _finish(prompts, section, journal, folder, lost)
    finally:
        journal.close()


def _answer_missing(
    prompts: Prompts,
    answering: Answerer,
    section: RegenerateSection,
    journal: Journal,
    on_answer: OnDone,
) -> dict[str, str]:
    missing = 0
    for prompt in prompts():
        if prompt.id not in journal.places and prompt.input_ids is not None:
            # Somebody else's ids: there is nothing to ask, and they are nobody's own answers.
            journal.add(prompt.id, [], {"dropped token ids": 1})
        if prompt.id in journal.places:
            on_answer(kept=True)
        else:
            missing += 1
    if not missing:
        return {}

    def unfinished() -> Iterator[Conversation]:
        for prompt in prompts():
            if prompt.id not in journal.places:
                yield Conversation(prompt, section, answering.reads_calls)

    def keep(conversation: Conversation) -> None:
        rows = conversation.rows()
        journal.add(conversation.prompt.id, rows, dict(conversation.tally))
        on_answer()

    return answering.run(unfinished(), keep)


def _finish(
    prompts: Prompts,
    section: RegenerateSection,
    journal: Journal,
    folder: Path,
    lost: dict[str, str],
) -> AnswerReport:
    """Copy the rows into shards, in the order of the prompts, and write the report."""
    account, writer, asked = AnswerAccount(), ShardWriter(folder, (SHARD_NAME,)), False
    for prompt in prompts():
        asked = True
        header, rows = journal.read(prompt.id)
        account.add(prompt.category, header)
        for row in rows:
            writer.add(SHARD_NAME, row)
    if not asked:
        raise DataError(
            expected="at least one training prompt",
            found="none",
            where="regenerate",
            fix="Set `train` above 0 for a source in prompts.sources.",
        )
    report = account.report(lost, _notes(section))
    writer.close()
    write_answer_report(folder, report)
    return report


def _notes(section: RegenerateSection) -> tuple[str, ...]:
    notes = []
    if section.endpoints:
        notes.append(
            "Every reply was held against the target's template and tokenizer: prompt ids, text of "
            "the generated ids, counts, and the end-of-turn token."
        )
    if section.on_length == "keep":
        notes.append("Answers that were cut are kept: what is there is trained on, an end is not.")
    return tuple(notes)


__all__ = ["UNFINISHED", "Answerer", "regenerate"]
