"""A teacher that answers while a draft trains plays whole conversations, as regenerate does."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_model
from data.answer_sets import answers_of, asked
from dspark.capture.teacher import EmbeddedMaker
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.answers import RegenerateSection
from dspark.config.recipe import TargetSection
from dspark.data.conversation import Maker
from dspark.data.embedded import Embedded
from dspark.data.played import Played, prompt_row
from dspark.data.prompt import Prompt
from dspark.data.renderer import Renderer
from dspark.engine.generate import BatchGenerator
from dspark.errors import StreamError
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row

CONTEXT = 256
RNG = random.Random(3)
QUESTIONS = list(dict.fromkeys(tiny_model.question(RNG)[0] for _ in range(60)))
PROMPTS = asked([QUESTIONS[0]], QUESTIONS[1:3], QUESTIONS[3:6], QUESTIONS[6:8])
MAKER = Maker("tiny", None, "embedded")


@pytest.fixture(scope="module")
def loaded(tiny_target: Path) -> LoadedTarget:
    return load_target(TargetSection(source=str(tiny_target), max_context=CONTEXT))


class Teacher:
    """The tiny target as a teacher of one recipe section."""

    def __init__(
        self, loaded: LoadedTarget, section: RegenerateSection, tokenizer: Any = None
    ) -> None:
        model = loaded.build((0, 1))
        self.section = section
        self.renderer = Renderer(tokenizer or loaded.tokenizer, loaded.end_ids, section)

        def engine_of(capacity: int) -> BatchGenerator:
            return BatchGenerator(model, self.renderer.end_ids, 8, capacity)

        self.engine_of = engine_of
        self.player = Played(engine_of, self.renderer, section, MAKER)
        self.maker = EmbeddedMaker(
            model,
            "tiny",
            batch_tokens=1024,
            dtype=torch.float32,
            engine=engine_of(CONTEXT),
            player=self.player,
            keep_truncated=section.on_length != "drop",
        )

    def rows(self, prompts: Sequence[Prompt]) -> list[Row]:
        return [prompt_row(p, self.section, self.renderer, CONTEXT) for p in prompts]

    def records(self, rows: Sequence[Row]) -> list[HiddenRecord]:
        found = list(self.maker.make(rows))
        assert [r.id for r in found] == [row.id for row in rows]
        for record, row in zip(found, rows, strict=True):
            assert len(record) <= row.longest
            assert int(record.loss_mask.sum()) <= row.answer
        return found


def test_every_turn_is_answered_and_the_rows_are_those_of_regenerate(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    section = RegenerateSection(max_new_tokens=48, top_p=0.95)
    teacher = Teacher(loaded, section)
    rows = teacher.rows(PROMPTS)
    assert [bool(row.asked) for row in rows] == [False, True, True, True]
    records = teacher.records(rows)
    embedded = Embedded(teacher.engine_of, teacher.renderer, MAKER, CONTEXT)
    wanted, report = answers_of(PROMPTS, embedded, section, tmp_path)
    assert report.later_turns_asked >= 3
    assert len(wanted) == len(PROMPTS)
    for record, answer in zip(records, wanted, strict=True):
        assert tuple(record.ids.tolist()) == answer.ids
        assert tuple(record.loss_mask.tolist()) == answer.loss_mask
    # Three turns: the mask is on, off for the next question, and on again.
    edges = (records[2].loss_mask[1:].int() - records[2].loss_mask[:-1].int()).tolist()
    assert edges.count(1) == 3


def test_one_turn_alone_is_asked_when_the_recipe_says_so(loaded: LoadedTarget) -> None:
    teacher = Teacher(loaded, RegenerateSection(max_new_tokens=48, turns=1))
    assert not any(row.asked or row.most for row in teacher.rows(PROMPTS))


def test_where_the_template_rewrites_the_past_the_longest_part_is_kept_and_told(
    loaded: LoadedTarget,
) -> None:
    forgetful = copy.deepcopy(loaded.tokenizer)
    forgetful.chat_template = forgetful.chat_template.replace(  # type: ignore[attr-defined]
        "{{ m.content }}", "{{ m.content[:8] if m.role == 'assistant' else m.content }}"
    )
    teacher = Teacher(loaded, RegenerateSection(max_new_tokens=48, temperatures=(0.0,)), forgetful)
    (record,) = teacher.records(teacher.rows(PROMPTS[2:3]))
    assert teacher.player.tally["sequences left out"] >= 1
    edges = (record.loss_mask[1:].int() - record.loss_mask[:-1].int()).tolist()
    assert edges.count(1) == 1


def test_a_cut_conversation_that_is_dropped_comes_without_anything_to_train_on(
    loaded: LoadedTarget,
) -> None:
    section = RegenerateSection(max_new_tokens=5, temperatures=(0.0,), on_length="drop")
    teacher = Teacher(loaded, section)
    for record in teacher.records(teacher.rows(PROMPTS)):
        assert int(record.loss_mask.sum()) == 0


def test_a_cut_answer_goes_on_where_the_recipe_says_so(loaded: LoadedTarget) -> None:
    short = {"max_new_tokens": 12, "temperatures": (0.0,)}
    cut = Teacher(loaded, RegenerateSection(**short))
    (once,) = cut.records(cut.rows(PROMPTS[:1]))
    goes_on = Teacher(loaded, RegenerateSection(**short, on_length="continue", continuations=6))
    (whole,) = goes_on.records(goes_on.rows(PROMPTS[:1]))
    assert int(once.loss_mask.sum()) == 12
    assert int(whole.loss_mask.sum()) > 24
    assert whole.ids[: len(once)].tolist() == once.ids.tolist()


def test_a_teacher_that_only_replays_refuses_a_conversation(loaded: LoadedTarget) -> None:
    teacher = Teacher(loaded, RegenerateSection(max_new_tokens=8))
    teacher.maker.player = None
    with pytest.raises(StreamError, match="prompts"):
        list(teacher.maker.make(teacher.rows(PROMPTS[1:2])))
