"""vLLM plain, vLLM with our draft, and our own engine both ways, on the same prompts.

    python benchmarks/against_vllm.py RUN --arm ours-plain --out FILE.json

Held-out prompts of a finished run, the workload's first, temperature 0, fp32, prefix caches off.
Every arm is a call of its own, a fresh process, so that each needs a quiet machine for a minute or
two only; what it found is put into ``--out`` beside the others. vLLM (``make vllm``) runs eagerly,
without its compiler, as dspark starts it on a CPU. Tokens per second are tokens emitted per second
of wall time, prompts included: the median over rounds, after one that only warms up.
``same_texts`` counts answers equal to the same engine's without a draft, and to our own plain ones.
"""

from __future__ import annotations

import argparse
import hashlib
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
from dspark.cli.suite_stack import draft_identity
from dspark.cli.vllm_process import vllm_environment, vllm_python
from dspark.config.engine import EngineOptions
from dspark.data.chat import prompt_ids
from dspark.data.shards import read_prompts

Arm = dict[str, dict[str, Any]]
ARMS = ("vllm-plain", "vllm-draft", "ours-plain", "ours-draft")
GREEDY = EngineOptions(verification="standard", draft_sample_method="greedy", prefix_cache=False)


def in_vllm(job: dict[str, Any], threads: int) -> Arm:
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
                "OMP_NUM_THREADS": str(threads),
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


def figures(arm: Arm) -> dict[str, Any]:
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
            "texts": [
                hashlib.sha256(str(ids).encode()).hexdigest()[:12] for ids in found["answers"]
            ],
        }
    return rows


def digest(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()[:12]


def compare_texts(arms: dict[str, Any]) -> None:
    """Fill in ``same_texts`` of every arm, as far as those to compare with are there."""
    for name, arm in arms.items():
        for batch, row in arm["batches"].items():
            plain = {"without a draft": f"{name.split('-')[0]}-plain", "ours, plain": "ours-plain"}
            others = {
                title: arms[other]["batches"][batch]["texts"]
                for title, other in plain.items()
                if batch in arms.get(other, {"batches": {}})["batches"]
            }
            row["same_texts"] = {
                title: sum(a == b for a, b in zip(row["texts"], texts, strict=True))
                for title, texts in others.items()
            }


def measured(args: argparse.Namespace, draft: Path) -> Arm:
    loaded = load_target_of(draft, None, Screen())
    held_out = read_prompts(args.run / "prompts", "held_out")[: args.prompts]
    prompts = [prompt_ids(loaded.tokenizer, p.messages, p.tools) for p in held_out]
    if args.arm.startswith("ours"):
        return in_ours(loaded, draft if args.arm == "ours-draft" else None, prompts, args)
    model = safetensors_source(loaded.files, args.run / "vllm-target-float32", torch.float32)
    engine: dict[str, Any] = {"model": model, "max_model_len": 1024, "max_num_seqs": 16}
    if args.arm == "vllm-draft":
        engine["speculative_config"] = {
            "method": "dspark", "model": str(draft.resolve()), "num_speculative_tokens": 7,
            "draft_sample_method": "greedy",
        }  # fmt: skip
    job = {"prompts": prompts, "max_tokens": args.max_tokens, "batches": args.batches,
           "rounds": args.rounds, "engine": engine}  # fmt: skip
    return in_vllm(job, args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--draft", type=Path, help="another draft than the run's")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    draft = args.draft or args.run / "draft"
    arm = measured(args, draft)
    record = json.loads(args.out.read_text()) if args.out.exists() else {"arms": {}}
    command = " ".join(["python", *sys.argv])
    record |= {
        "what": "vLLM and our engine, each plain and with the same draft, fp32, temperature 0",
        "vllm": "0.32.0 (CPU build), eager",
        "draft": draft_identity(draft),
    }
    record["arms"][args.arm] = {**origin_of(command).model_dump(), "batches": figures(arm)}
    compare_texts(record["arms"])
    atomic_json(args.out, record)
    for batch, row in record["arms"][args.arm]["batches"].items():
        print(args.arm, batch, {k: v for k, v in row.items() if k != "texts"})


if __name__ == "__main__":
    main()
