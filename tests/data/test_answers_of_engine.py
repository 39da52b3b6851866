"""The embedded engine on a real, tiny target: in this process, and behind a real HTTP server."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from client.scripted_server import scripted
from data.answer_sets import answers_of, asked, section_of, served
from data.answering_server import AnsweringServer, by_engine
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.answers import RegenerateSection
from dspark.config.recipe import TargetSection
from dspark.data.chat import prompt_ids
from dspark.data.conversation import Maker
from dspark.data.embedded import Embedded
from dspark.data.renderer import Renderer
from dspark.engine.generate import BatchGenerator

RNG = random.Random(3)
QUESTIONS = list(dict.fromkeys(tiny_model.question(RNG)[0] for _ in range(60)))[:10]
PROMPTS = asked(*([text] for text in QUESTIONS[:6]), QUESTIONS[6:8], QUESTIONS[8:10])


@pytest.fixture(scope="module")
def loaded(tiny_target: Path) -> LoadedTarget:
    return load_target(TargetSection(source=str(tiny_target), max_context=256))


def embedded(loaded: LoadedTarget, section: RegenerateSection) -> Embedded:
    model = loaded.build(())
    renderer = Renderer(loaded.tokenizer, loaded.end_ids, section)
    return Embedded(
        lambda capacity: BatchGenerator(model, renderer.end_ids, 8, capacity),
        renderer,
        Maker("tiny", None, "embedded"),
        256,
    )


def facts(rows: list[Any]) -> list[Any]:
    return [(row.id, row.ids, row.loss_mask, row.messages, row.temperature) for row in rows]


def test_a_server_on_the_engine_gives_the_rows_of_the_engine_itself(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 48, "top_p": 0.95}
    own = RegenerateSection(**settings)
    ours, report = answers_of(PROMPTS, embedded(loaded, own), own, tmp_path / "own")
    server = AnsweringServer(
        loaded.tokenizer, by_engine(loaded.build(()), frozenset(loaded.end_ids))
    )
    with scripted(server) as running:
        section = section_of(running.url, **settings)
        theirs, other = answers_of(
            PROMPTS, served(loaded.tokenizer, section, loaded.end_ids), section, tmp_path / "served"
        )
    assert facts(ours) == facts(theirs)
    assert {row.temperature for row in ours} == {0.0, 1.0}
    assert report.later_turns_asked == other.later_turns_asked == 2
    assert report.finish_reasons == other.finish_reasons
    assert [m.server for m in report.makers] == ["embedded"]
    assert [m.server for m in other.makers] == [running.url]


def test_ids_are_the_template_and_then_what_the_engine_wrote(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    section = RegenerateSection(max_new_tokens=60, temperatures=(0.0,))
    rows, _ = answers_of(PROMPTS[:3], embedded(loaded, section), section, tmp_path)
    for row, prompt in zip(rows, PROMPTS, strict=False):
        before = prompt_ids(loaded.tokenizer, prompt.messages)
        assert list(row.ids[: len(before)]) == before
        assert row.loss_mask == (0,) * len(before) + (1,) * (len(row.ids) - len(before))
        end = row.ids[-1] in loaded.end_ids
        assert end == (row.finish_reason == "stop")
        assert row.generation is not None
        assert row.generation.counts.generated == len(row.ids) - len(before)


def test_a_turn_that_does_not_fit_the_context_is_not_asked(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    section = RegenerateSection(max_new_tokens=100, temperatures=(0.0,), on_length="keep")
    prompts = asked(["tom has 1 and gets 2"], ["tom has 1 and gets 3", "a" * 160])
    rows, report = answers_of(prompts, embedded(loaded, section), section, tmp_path)
    assert len(rows) == 2
    assert sum(report.later_turns_left.values()) == 1
