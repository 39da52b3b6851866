"""Where a run's target speaks before it is taught anything: its answers, and its own user turns.

Who speaks is the recipe's choice: the embedded engine in this process, or servers of the same
target.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dspark.artifacts import read_manifest
from dspark.cli.context import RunContext, StageResult
from dspark.config.resolve import layer_ids
from dspark.data.answer_report import AnswerReport
from dspark.data.chat import end_ids
from dspark.data.conversation import EMBEDDED, Maker
from dspark.data.embedded import Embedded
from dspark.data.regenerate import UNFINISHED, Answerer, regenerate
from dspark.data.renderer import Renderer
from dspark.data.self_instruct import OnResult, working_files, write_all_turns
from dspark.data.served import Served, endpoints_of, write_served
from dspark.data.shards import stream_prompts
from dspark.data.witness import Witness
from dspark.decoding.request import AnswerEngine, GenerationRequest
from dspark.engine.generate import BatchGenerator


def run_answers(run: RunContext, folder: Path) -> StageResult:
    """The target answers the training prompts: in this process, or behind the recipe's servers."""
    target, section = run.target, run.recipe.regenerate
    renderer = Renderer(target.tokenizer, end_ids(target), section)
    revision = run.fetched_files.revision
    answering: Answerer
    if section.endpoints:
        answering = Served(endpoints_of(section), section, Witness(renderer, revision))
    else:
        model = target.build(layer_ids(run.recipe.draft, target.num_layers), section.precision)
        maker = Maker(run.recipe.target.source, revision, EMBEDDED)
        context = run.recipe.target.max_context

        def engine_of(capacity: int) -> AnswerEngine:
            return BatchGenerator(model, renderer.end_ids, section.batch_size, capacity)

        answering = Embedded(engine_of, renderer, maker, context)
    source = run.folder("prompts")
    total = read_manifest(source, "prompts").counts["train"]
    with run.screen.bar("target answers", total) as bar:
        report = regenerate(
            lambda: stream_prompts(source, "train"), answering, section, folder, bar.advance
        )
    return answers_result(report)


def answers_result(report: AnswerReport) -> StageResult:
    """What a set of answers adds to its manifest, and its line on the screen."""
    notes = report.model_dump(
        mode="json",
        include={"finish_reasons", "dropped", "coverage", "truncated", "lost_endpoints"},
    )
    return StageResult(report.counts(), notes, report.line(), (UNFINISHED,))


def write_user_turns(run: RunContext, folder: Path) -> None:
    """What the target itself asks, for sources of kind self_instruct."""
    recipe, target = run.recipe, run.target
    sources = recipe.prompts.sources
    if not working_files(sources):
        return
    section, ends = recipe.regenerate, end_ids(target)

    def write(requests: list[GenerationRequest], stop_ids: Collection[int], keep: OnResult) -> None:
        if section.endpoints:
            write_served(endpoints_of(section), section, requests, stop_ids, keep)
            return
        model = target.build(layer_ids(recipe.draft, target.num_layers), section.precision)
        longest = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests)
        engine = BatchGenerator(model, frozenset(stop_ids), section.batch_size, longest)
        engine.run(requests, keep, lambda _: None)

    with run.screen.bar("target writes user turns", None) as bar:
        write_all_turns(sources, folder, target.tokenizer, ends, write, bar.advance)
