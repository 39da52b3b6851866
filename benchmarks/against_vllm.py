"""vLLM plain, vLLM with our draft, and our own engine both ways, on the same prompts.

    python benchmarks/against_vllm.py runs/quickstart --out benchmarks/results/against_vllm.json

Held-out prompts of a finished run, the workload's first, temperature 0, fp32, one thread, prefix
caches off. vLLM (``make vllm``) runs eagerly, without its compiler, as it is started from here.
Tokens per second are tokens emitted per second of wall time, prompts included: medians over rounds.
``same_texts`` counts answers equal to the same engine's without a draft, and to our own plain ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dspark import Engine, SamplingParams
from dspark.artifacts import atomic_json
from dspark.checkpoint.materialise import safetensors_source
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import origin_of
from dspark.cli.vllm_process import vllm_environment, vllm_python
from dspark.config.engine import EngineOptions
from dspark.data.chat import prompt_ids
from dspark.data.shards import read_prompts

Arm = dict[str, dict[str, Any]]
GREEDY = EngineOptions(verification="standard", draft_sample_method="greedy", prefix_cache=False)


def in_vllm(job: dict[str, Any]) -> Arm:
    program = Path(__file__).with_name("vllm_arm.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        done = subprocess.run(
            [vllm_python(), str(program), str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={
                **vllm_environment(),
                "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        )
    found: Arm = json.loads(done.stdout.splitlines()[-1])
    return found


def in_ours(
    loaded: LoadedTarget, draft: Path | None, prompts: list[list[int]], args: argparse.Namespace
) -> Arm:
    engine = Engine(loaded, draft, options=GREEDY)
    asked = SamplingParams(temperature=0, max_new_tokens=args.max_tokens)
    out: Arm = {}
    for batch in args.batches:
        seconds: list[float] = []
        outputs: list[Any] = []
        for number in range(args.rounds + 1):
            started, outputs = time.perf_counter(), []
            for start in range(0, len(prompts), batch):
                outputs += engine.generate(prompts[start : start + batch], asked)
            if number:
                seconds.append(time.perf_counter() - started)
        counts = [o.acceptance for o in outputs if o.acceptance is not None]
        counters = {
            "num_drafts": sum(c.steps for c in counts),
            "num_accepted_tokens": sum(c.accepted for c in counts),
        }
        answers = [list(o.completions[0].ids) for o in outputs]
        out[str(batch)] = {"seconds": seconds, "answers": answers, "counters": counters}
    return out


def figures(arm: Arm, plain: Arm, ours: Arm) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for batch, found in arm.items():
        tokens = sum(map(len, found["answers"]))
        steps = found["counters"].get("num_drafts", 0)
        rows[batch] = {
            "tokens_per_second": round(tokens / statistics.median(found["seconds"]), 2),
            "seconds": [round(s, 3) for s in found["seconds"]],
            "acceptance_length": (
                round(1 + found["counters"]["num_accepted_tokens"] / steps, 3) if steps else None
            ),
            "same_texts": {
                name: sum(
                    a == b for a, b in zip(found["answers"], o[batch]["answers"], strict=True)
                )
                for name, o in (("without a draft", plain), ("ours, plain", ours))
            },
            "answers": len(found["answers"]),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--draft", type=Path, help="another draft than the run's")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draft = args.draft or args.run / "draft"
    loaded = load_target_of(draft, None, Screen())
    held_out = read_prompts(args.run / "prompts", "held_out")[: args.prompts]
    prompts = [prompt_ids(loaded.tokenizer, p.messages, p.tools) for p in held_out]
    model = safetensors_source(loaded.files, args.run / "vllm-target-float32", torch.float32)
    engine: dict[str, Any] = {"model": model, "max_model_len": 1024, "max_num_seqs": 16}
    spec = {"method": "dspark", "model": str(draft.resolve()), "num_speculative_tokens": 7}
    job = {"prompts": prompts, "max_tokens": args.max_tokens, "batches": args.batches,
           "rounds": args.rounds}  # fmt: skip
    arms = {
        "vllm plain": in_vllm({**job, "engine": engine}),
        "vllm with the draft": in_vllm({**job, "engine": {**engine, "speculative_config": spec}}),
        "ours plain": in_ours(loaded, None, prompts, args),
        "ours with the draft": in_ours(loaded, draft, prompts, args),
    }
    results = {
        name: figures(arm, arms[f"{name.split()[0]} plain"], arms["ours plain"])
        for name, arm in arms.items()
    }
    record = {
        "what": "vLLM and our engine, each plain and with the same draft",
        **origin_of(" ".join(["python", *sys.argv])).model_dump(),
        "vllm": "0.32.0 (CPU build)",
        "arms": results,
    }
    atomic_json(args.out, record)
    for name, rows in results.items():
        print(name, json.dumps(rows))


if __name__ == "__main__":
    main()
