"""Inside the vLLM environment: batches of token ids through ``vllm.LLM`` with dspark's plugin.

``job.json`` in the job folder: ``engine`` (arguments of ``LLM``), ``batches`` of ``prompts`` (token
ids) with ``sampling`` (one for all, or one each). Told are the answers, the engine's own counters
after each batch, and every block that was drafted: request, anchor's position and id, tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_setup import job_folder, write_answer
from vllm import LLM, SamplingParams


def counters(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:spec_decode", "vllm:prefix_cache", "vllm:num_preempt")):
            found[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    return found


def record_drafts(drafted: list[Any]) -> None:
    """Look over the proposer's shoulder; nothing it does is changed."""
    from dspark.vllm_plugin.latent import LatentProposer
    from dspark.vllm_plugin.proposer import DSparkProposer

    for kind in (DSparkProposer, LatentProposer):
        look_over(kind, drafted)


def look_over(kind: Any, drafted: list[Any]) -> None:
    propose = kind.propose

    def looked_at(self: Any, *args: Any, **named: Any) -> Any:
        tokens = propose(self, *args, **named)
        requests = self._runner.input_batch.req_ids
        # In the middle of a prompt a block is drafted too, behind no real anchor, and thrown away.
        thrown = self._runner.discard_request_mask.np[: len(requests)].tolist()
        rows = zip(
            requests,
            self._anchor_positions.tolist(),
            self._anchors.tolist(),
            tokens.tolist(),
            strict=True,
        )
        drafted.extend(row for row, gone in zip(rows, thrown, strict=True) if not gone)
        return tokens

    kind.propose = looked_at


def main() -> None:
    folder: Path = job_folder()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    drafted: list[Any] = []
    llm = LLM(dtype="float32", enforce_eager=True, seed=0, disable_log_stats=False, **job["engine"])
    if "speculative_config" in job["engine"]:
        record_drafts(drafted)
    out = []
    for batch in job["batches"]:
        sampling = batch["sampling"]
        params = (
            [SamplingParams(**s) for s in sampling]
            if isinstance(sampling, list)
            else SamplingParams(**sampling)
        )
        before = len(drafted)
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        answers = llm.generate(prompts, params, use_tqdm=False)
        out.append(
            {
                "answers": [list(o.token_ids) for a in answers for o in a.outputs],
                "requests": [a.request_id for a in answers],
                "drafted": drafted[before:],
                "counters": counters(llm),
            }
        )
    write_answer(folder, {"batches": out})


if __name__ == "__main__":
    main()
