"""Inside vLLM's environment: decode prompts and say how long it took. Started by
``against_vllm.py``.

    python benchmarks/vllm_arm.py JOB.json

The job: ``engine`` (arguments of ``vllm.LLM``), ``prompts`` (token ids), ``max_tokens``,
``batches`` and ``rounds``. After one round to warm up, every round decodes all prompts, ``batch``
at a time, at temperature 0; its seconds are printed with the texts and the engine's own counters,
as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def counters(llm: LLM) -> dict[str, float]:
    wanted = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    found = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics()}
    return {name: found[name].value for name in wanted if name in found}


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llm = LLM(
        dtype="float32", enforce_eager=True, enable_prefix_caching=False, seed=0,
        disable_log_stats=False, **job["engine"],
    )  # fmt: skip
    asked = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    out: dict[str, Any] = {}
    for batch in job["batches"]:
        seconds, answers = [], []
        for number in range(job["rounds"] + 1):
            before, started = counters(llm), time.perf_counter()
            answers = []
            for start in range(0, len(prompts), batch):
                part = llm.generate(prompts[start : start + batch], asked, use_tqdm=False)
                answers += [list(o.outputs[0].token_ids) for o in part]
            if number:
                seconds.append(time.perf_counter() - started)
        grown = {name: value - before[name] for name, value in counters(llm).items()}
        out[str(batch)] = {"seconds": seconds, "answers": answers, "counters": grown}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
