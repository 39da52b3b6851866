"""On-policy answers: the target answers the training prompts itself.

A draft learns the target's distribution on the target's own text, so answers written by people or
by another model would teach it contexts that serving never shows. The engine is handed in; this
stage decides seeds and temperatures, keeps what is finished across interruptions, and counts how
answers ended (truncated ones are reported, never hidden).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dspark.artifacts import atomic_write, storage_guard
from dspark.config.recipe import RegenerateSection
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import AnswerEngine, GenerationRequest, GenerationResult
from dspark.errors import DataError
from dspark.hidden.answers import Answer, write_answers

ANSWERS = "answers.jsonl"
UNFINISHED = "unfinished.jsonl"


@dataclass(frozen=True)
class AnswerReport:
    """Counts of one regeneration."""

    answers: int
    tokens: int
    finish_reasons: dict[str, int]
    dropped_truncated: int
    dropped_empty: int


def answer_seed(prompt_id: str) -> int:
    """A request's seed depends on its prompt's id only."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:4], "big")


def regenerate(
    prompts: Sequence[tuple[str, str, list[int]]],
    engine: AnswerEngine,
    section: RegenerateSection,
    folder: Path,
    on_answer: Callable[[int], None] = lambda _: None,
) -> AnswerReport:
    """Answer ``prompts`` (id, category, ids) and write ``folder/answers.jsonl``.

    Temperatures of the section alternate over the prompts. Answers an interrupted run had finished
    are read back from ``unfinished.jsonl`` and not made again; the caller removes that file when
    the stage is sealed. ``on_answer`` gets the number of answers that became ready.

    Raises:
        DataError: no prompts, or no answer was left to train on.
    """
    if not prompts:
        raise DataError(
            expected="at least one training prompt",
            found="none",
            where="regenerate",
            fix="Set `train` above 0 for a source in prompts.sources.",
        )
    requests, meta = {}, {}
    for number, (prompt_id, category, ids) in enumerate(prompts):
        temperature = section.temperatures[number % len(section.temperatures)]
        params = SamplingParams(
            temperature=temperature,
            seed=answer_seed(prompt_id),
            max_new_tokens=section.max_new_tokens,
        )
        requests[prompt_id] = GenerationRequest(prompt_id, tuple(ids), params)
        meta[prompt_id] = (category, temperature)
    done = {a.id: a for a in _read_unfinished(folder / UNFINISHED) if a.id in requests}
    on_answer(len(done))
    with storage_guard(folder), (folder / UNFINISHED).open("a", encoding="utf-8") as log:

        def keep(result: GenerationResult) -> None:
            category, temperature = meta[result.id]
            prompt = requests[result.id].prompt_ids
            answer = Answer(
                id=result.id,
                category=category,
                temperature=temperature,
                prompt_length=len(prompt),
                finish_reason=result.finish_reason,
                ids=prompt + result.ids,
            )
            done[answer.id] = answer
            log.write(answer.model_dump_json() + "\n")
            log.flush()
            on_answer(1)

        missing = [r for i, r in requests.items() if i not in done]
        if missing:
            engine.run(missing, keep, lambda _: None)
    return _finish(folder, [done[i] for i in requests], section)


def _finish(folder: Path, answers: list[Answer], section: RegenerateSection) -> AnswerReport:
    reasons = Counter(str(a.finish_reason) for a in answers)
    whole = [a for a in answers if section.keep_truncated or a.finish_reason == "stop"]
    # An answer of one token has no anchor: nothing could be learnt from it.
    usable = [a for a in whole if len(a.ids) - a.prompt_length >= 2]
    if not usable:
        raise DataError(
            expected="answers of at least two tokens",
            found=f"{len(answers)} answers, finish reasons {dict(reasons)}, none usable",
            where="regenerate",
            fix="Raise regenerate.max_new_tokens or keep truncated answers.",
        )
    write_answers(folder / ANSWERS, usable)
    return AnswerReport(
        answers=len(usable),
        tokens=sum(len(a.ids) - a.prompt_length for a in usable),
        finish_reasons=dict(reasons),
        dropped_truncated=len(answers) - len(whole),
        dropped_empty=len(whole) - len(usable),
    )


def _read_unfinished(path: Path) -> list[Answer]:
    """Whole lines an interrupted run left; a torn last line is simply answered again."""
    if not path.exists():
        return []
    answers = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            answers.append(Answer.model_validate(json.loads(line)))
        except (json.JSONDecodeError, ValidationError):
            continue
    # Rewritten whole, so that appending never continues a torn line.
    atomic_write(path, "".join(a.model_dump_json() + "\n" for a in answers))
    return answers
