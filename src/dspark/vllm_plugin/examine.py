"""``python -m dspark.vllm_plugin.examine JOB.json``: what ``dspark doctor`` asks vLLM.

One process is one engine: with a draft it answers prompts and counts what was accepted, without one
it answers prompts and hands out the states of texts. Found is written into the job's folder:
``answers.json``, a list of ``ids`` with the counters' growth, and ``states.safetensors`` of texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from dspark.hidden.answers import Answer
from dspark.vllm_plugin.capture import engine_process, scratch_folder
from dspark.vllm_plugin.teacher import TeacherOptions, VllmTeacher

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Job(BaseModel):
    """``speculative`` is vLLM's ``--speculative-config``; None: no draft, and the states of
    ``texts`` (ids and prompt length) at ``layer_ids``. ``end_ids`` finish an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    precision: str
    max_model_len: int
    speculative: dict[str, Any] | None
    prompts: list[list[int]]
    max_tokens: int
    end_ids: list[int]
    texts: list[tuple[list[int], int]] = []
    layer_ids: tuple[int, ...] = ()
    folder: Path


def with_draft(job: Job) -> Iterator[dict[str, Any]]:
    """Prompts one after another, so that the engine's counters are those of one answer."""
    llm = LLM(
        model=job.model,
        dtype=job.precision,
        enforce_eager=bool(current_platform.is_cpu()),
        max_model_len=job.max_model_len,
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        disable_log_stats=False,
        speculative_config=job.speculative,
    )
    before = counted(llm)
    for ids in job.prompts:
        (output,) = llm.generate([{"prompt_token_ids": ids}], greedy(job), use_tqdm=False)
        after = counted(llm)
        moved = {name: after[name] - before[name] for name in COUNTERS}
        yield {"ids": list(output.outputs[0].token_ids), **moved}
        before = after


def without(job: Job, scratch: Path) -> Iterator[dict[str, Any]]:
    """Answers of an engine whose states are read, and the states of texts as a file."""
    teacher = VllmTeacher(
        TeacherOptions(
            model=job.model,
            layer_ids=job.layer_ids,
            scratch=scratch,
            precision=job.precision,
            dtype=getattr(torch, job.precision),
            max_model_len=job.max_model_len,
        )
    )
    for output in teacher.generate(job.prompts, [greedy(job)] * len(job.prompts)):
        yield {"ids": list(output.outputs[0].token_ids)}
    save_file(states_of(teacher, job.texts), job.folder / "states.safetensors")


def states_of(teacher: VllmTeacher, texts: Sequence[tuple[list[int], int]]) -> dict[str, Tensor]:
    """``N.taps`` [S, L, H], ``N.before`` and ``N.final`` [S, H] of text N."""
    answers = [
        Answer(
            id=str(number), category="examined", temperature=0.0, prompt_length=length,
            finish_reason="length", ids=tuple(ids),
            loss_mask=tuple(0 if i < length else 1 for i in range(len(ids))),
        )
        for number, (ids, length) in enumerate(texts)
    ]  # fmt: skip
    found = {}
    for number, parts in enumerate(teacher.states(answers)):
        for name, tensor in zip(("taps", "before", "final"), parts, strict=True):
            found[f"{number}.{name}"] = tensor.contiguous()
    return found


def greedy(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=job.max_tokens, stop_token_ids=job.end_ids, detokenize=False
    )


def counted(llm: LLM) -> dict[str, int]:
    found = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics()}
    return {name: int(found[name].value) if name in found else 0 for name in COUNTERS}


def main() -> None:
    job = Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = []
    with engine_process(), scratch_folder() as scratch:
        made = with_draft(job) if job.speculative is not None else without(job, scratch)
        for answer in made:
            answers.append(answer)
            print(json.dumps({"answers": 1}), flush=True)
    (job.folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
