"""``python -m dspark.vllm_plugin.teach JOB``: a teacher of a live stream, in vLLM's environment.

``dspark teach`` becomes this process when the recipe says ``capture.engine: vllm``. JOB is JSON
(see :class:`Job`), not a file, so that nothing is left behind whoever ends it. Records are made of
a group alone, never of two together: what else vLLM computes at the time decides how it rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from vllm import SamplingParams

from dspark.capture.teacher import RowMaker, teach
from dspark.checkpoint.pretrained import read_tokenizer
from dspark.checkpoint.source import TargetFiles
from dspark.config.answers import RegenerateSection
from dspark.config.recipe import CaptureSection
from dspark.data.conversation import Maker
from dspark.data.played import Played
from dspark.data.renderer import Renderer
from dspark.decoding.request import GenerationRequest, GenerationResult
from dspark.hidden.rows import Teaching
from dspark.hidden.writer import TeacherLink
from dspark.vllm_plugin import vllm_version
from dspark.vllm_plugin.capture import engine_process, scratch_folder
from dspark.vllm_plugin.teacher import TeacherOptions, VllmTeacher, room_for


class Answering(BaseModel):
    """How prompts are answered (mode ``online``): ``source`` and ``revision`` name the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    section: RegenerateSection
    end_ids: tuple[int, ...]
    source: str
    revision: str | None


class Job(BaseModel):
    """``model`` is a folder of safetensors; ``answering`` None: replay only.

    ``longest`` bounds a sequence in tokens, ``lost_seconds`` is how long a silent trainer is
    waited for; the rest is the recipe's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    capture: CaptureSection
    answering: Answering | None
    teaching: Teaching
    longest: int
    endpoints: list[str]
    name: str | None
    lost_seconds: float


class VllmAnswers:
    """Answers requests in ``teacher``'s engine; ``end_ids`` finish an answer, and stay in it."""

    def __init__(self, teacher: VllmTeacher, end_ids: Sequence[int]) -> None:
        self.teacher, self.end_ids = teacher, list(end_ids)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        on_result: Callable[[GenerationResult], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        """All at once; texts of a seed are vLLM's, not those of the embedded engine."""
        asked = [
            SamplingParams(
                temperature=r.params.temperature,
                top_p=r.params.top_p,
                seed=r.params.seed,
                max_tokens=r.params.max_new_tokens,
                stop_token_ids=self.end_ids,
                detokenize=False,
            )
            for r in requests
        ]
        outputs = self.teacher.generate([r.prompt_ids for r in requests], asked)
        for request, output in zip(requests, outputs, strict=True):
            (answer,) = output.outputs
            ids = tuple(answer.token_ids)
            stopped = bool(ids) and ids[-1] in self.end_ids
            on_tokens(len(ids))
            on_result(GenerationResult(request.id, ids, "stop" if stopped else "length"))


def maker_of(job: Job, scratch: Path) -> RowMaker:
    """The engine, and what makes records with it. Raises as :class:`VllmTeacher`."""
    section = job.capture
    teacher = VllmTeacher(
        TeacherOptions(
            model=job.model,
            layer_ids=job.teaching.layer_ids,
            scratch=scratch,
            precision=section.precision,
            dtype=getattr(torch, section.dtype),
            max_model_len=room_for(job.model, job.longest),
            batch_tokens=section.batch_tokens,
        )
    )
    how = job.answering
    if how is None:
        return RowMaker(teacher.records, job.teaching)
    tokenizer = read_tokenizer(TargetFiles(how.source, job.model, None, how.revision))
    renderer = Renderer(tokenizer, how.end_ids, how.section)
    engine = VllmAnswers(teacher, how.end_ids)
    named = Maker(how.source, how.revision, f"vllm {vllm_version()}")
    return RowMaker(
        teacher.records,
        job.teaching,
        engine=engine,
        player=Played(lambda _: engine, renderer, how.section, named),
        keep_truncated=how.section.on_length != "drop",
    )


def main() -> None:
    job = Job.model_validate_json(sys.argv[1])
    with engine_process(), scratch_folder() as scratch:
        maker = maker_of(job, scratch)
        link = TeacherLink(
            job.endpoints, maker.teaching, name=job.name, lost_seconds=job.lost_seconds
        )
        try:
            print(f"{teach(link, maker)} records taught", flush=True)
            if isinstance(maker.player, Played):
                print(f"conversations: {dict(sorted(maker.player.tally.items()))}", flush=True)
        finally:
            link.close()


if __name__ == "__main__":
    main()
