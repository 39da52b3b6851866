"""``python -m dspark.vllm_plugin.capture JOB.json``: the states stage, in vLLM's environment.

``dspark`` starts it as a process of its own because vLLM pins another torch. In: the job (see
:class:`Job`) and an answers folder. Out: one record per answer in the store, and a line of JSON on
stdout per record, ``{"tokens": n}``. Records that are there already are not made again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dspark.errors import DSparkError

SCRATCH = "/dev/shm"


class Job(BaseModel):
    """``model`` is a folder of safetensors; the rest as in the capture section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    answers: Path
    store: Path
    layer_ids: tuple[int, ...]
    precision: str
    dtype: str
    batch_tokens: int


def run(job: Job) -> int:
    """Make what is missing; the number of new records.

    Raises:
        DSparkError: the target, an answer or a record is not as it must be.
    """
    import torch

    from dspark.hidden.answers import read_answers
    from dspark.hidden.disk import DiskStore
    from dspark.vllm_plugin.teacher import TeacherOptions, VllmTeacher

    store = DiskStore(job.store)
    present = set(store.ids())
    answers = [a for a in read_answers(job.answers) if a.id not in present]
    if not answers:
        return 0
    with scratch_folder() as scratch:
        teacher = VllmTeacher(
            TeacherOptions(
                model=job.model,
                layer_ids=job.layer_ids,
                scratch=scratch,
                precision=job.precision,
                dtype=getattr(torch, job.dtype),
                max_model_len=max(len(a.ids) for a in answers) + 1,
                batch_tokens=job.batch_tokens,
            )
        )
        for record in teacher.records(answers):
            store.put(record)
            print(json.dumps({"tokens": len(record)}), flush=True)
    return len(answers)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Where states lie between engine and reader: in memory if there is room for files."""
    place = SCRATCH if os.access(SCRATCH, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dspark-states-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def engine_process() -> Iterator[None]:
    """A process that is one engine of vLLM's: an error of ours ends it in words, with status 1."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        yield
    except DSparkError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def main() -> None:
    with engine_process():
        run(Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
