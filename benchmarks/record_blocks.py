"""Record what a real draft says of its blocks and how many tokens the target accepts.

    python benchmarks/record_blocks.py runs/quickstart \\
        --out benchmarks/results/recorded_blocks.json \\
        --costs benchmarks/results/scheduler_costs.json

Answers the run's held-out prompts of every category with the embedded engine, verifying everything,
and keeps each whole block: logits of the confidence head and accepted tokens, in the order of the
answer. ``--costs`` also keeps what this engine's steps cost, as it measures that at its start.
``benchmarks/schedule_sim.py`` replays both without a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark.api import Engine
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import origin_of
from dspark.config.engine import EngineOptions
from dspark.data.chat import prompt_ids
from dspark.data.shards import read_prompts
from dspark.decoding.params import SamplingParams
from dspark.engine.measure import measure_costs
from dspark.engine.recording import record_blocks


def command_of(options: argparse.Namespace) -> str:
    costs = f" --costs {options.costs}" if options.costs else ""
    return f"python benchmarks/record_blocks.py {options.run} --out {options.out}{costs}"


def save_costs(engine: Engine, options: argparse.Namespace) -> None:
    table = measure_costs(engine.core, seconds=20.0)
    rounded = {
        name: [[count, round(seconds, 5)] for count, seconds in curve]
        for name, curve in table.as_json().items()
    }
    result = {
        "what": "seconds of the embedded engine's steps, as it measures them at its start",
        "max_requests": engine.core.options.max_requests,
        **origin_of(command_of(options)).model_dump(),
        "costs": rounded,
    }
    options.costs.write_text(json.dumps(result) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--answers", type=int, default=3, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--costs", type=Path)
    options = parser.parse_args()
    target = load_target_of(options.run / "draft", None, Screen(Console(stderr=True)))
    engine = Engine(target, options.run / "draft", options=EngineOptions(max_requests=32))
    if options.costs:
        save_costs(engine, options)
    prompts = [
        q for q in read_prompts(options.run / "prompts", "held_out") for _ in range(options.answers)
    ]
    params = [
        SamplingParams(temperature=options.temperature, seed=i, max_new_tokens=options.tokens)
        for i in range(len(prompts))
    ]
    ids = [prompt_ids(target.tokenizer, q.messages, q.tools) for q in prompts]
    blocks = record_blocks(engine.core, ids, params)
    answers: list[dict[str, Any]] = [{"category": q.category, "blocks": []} for q in prompts]
    for logits, accepted, number in zip(*blocks.arrays(), strict=True):
        answers[number]["blocks"].append([*(round(float(x), 3) for x in logits), int(accepted)])
    result = {
        "what": "confidence logits of each slot and accepted tokens of whole blocks",
        "temperature": options.temperature,
        "verification": engine.core.options.verification,
        **origin_of(command_of(options)).model_dump(),
        "answers": [a for a in answers if a["blocks"]],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{len(blocks.accepted)} blocks of {len(result['answers'])} answers: {options.out}")


if __name__ == "__main__":
    main()
