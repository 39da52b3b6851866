"""Inside the vLLM environment, without dspark: vLLM's own V2 runner and DSparkSpeculator on a CPU.

vLLM runs its V2 runner on a CPU with triton-cpu. That build of Triton does not come along with its
CPU distribution, so the kernels go through Triton's interpreter here, slowly. Nothing of
the runner or of the speculator is changed; what is mended beneath them is in ``engine_setup``.

``job.json`` in the job folder as in ``run_offline.py``, one batch; told are the answers and every
block that was drafted behind a real anchor: request, anchor's position and id, tokens.
"""

from __future__ import annotations

import json
from typing import Any

import interpreted_triton  # noqa: F401  (before anything of vLLM)
from engine_setup import job_folder, mend_grouped_norm, write_answer
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator


def record_drafts(drafted: list[Any]) -> None:
    """Look over the speculator's shoulder; nothing it does is changed."""
    propose = DSparkSpeculator.propose

    def looked_at(self: Any, input_batch: Any, *args: Any, **named: Any) -> Any:
        tokens = propose(self, input_batch, *args, **named)
        if named.get("dummy_run"):
            return tokens
        count = input_batch.num_reqs
        first = self._anchor_idx[:count]
        rows = zip(
            input_batch.req_ids,
            self.input_buffers.positions[first].tolist(),
            self.input_buffers.input_ids[first].tolist(),
            tokens[:count].tolist(),
            strict=True,
        )
        drafted.extend(rows)
        return tokens

    DSparkSpeculator.propose = looked_at


def main() -> None:
    folder = job_folder()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    wrong = mend_grouped_norm()
    drafted: list[Any] = []
    llm = LLM(dtype="float32", enforce_eager=True, seed=0, disable_log_stats=False, **job["engine"])
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    record_drafts(drafted)
    (batch,) = job["batches"]
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    answers = llm.generate(prompts, SamplingParams(**batch["sampling"]), use_tqdm=False)
    write_answer(
        folder,
        {
            "runner": type(runner).__mro__[1].__module__,
            "speculator": type(runner.speculator).__module__,
            "grouped norm was wrong by": wrong,
            "answers": [list(o.token_ids) for a in answers for o in a.outputs],
            "requests": [a.request_id for a in answers],
            "drafted": drafted,
        },
    )


if __name__ == "__main__":
    main()
