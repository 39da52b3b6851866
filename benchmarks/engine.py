"""The embedded engine: with the draft against without, and against transformers' own decoding.

    python benchmarks/engine.py runs/quickstart --out benchmarks/results/engine.json

Batches of 1, 4 and 16 at temperature 0 and 1, on the run's held-out workload prompts and on its
general ones, never trained on. All arms of a setting decode the same prompts with the same seeds,
and take turns within every round, so that a slow minute hits all alike; figures are medians over
rounds, speeds are tokens emitted per second of wall time, prompts included.

Of every drafting setting also the share of the limit ``tau * T1 / (Tdraft + Tverify)``: T1 is the
plain arm's target forward per token, Tdraft and Tverify the same step's draft pass and target
forward with its logits. What is missing to 1 is everything around them: settling, context rows,
scheduling, text.

At batch 1 and temperature 0 transformers decodes the same prompts: ``generate``, with prompt
lookup, and assisted by the target's own first layers. Speeds of whole answers, prompts included,
and of decoding alone: what an answer took beyond one of a single token. (No smaller model with this
tokenizer comes in a package, so there is no assistant of the usual kind.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark import Engine, SamplingParams
from dspark.checkpoint.pretrained import read_config, read_model
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.cli.origin import origin_of
from dspark.config.engine import EngineOptions
from dspark.data.chat import prompt_ids
from dspark.data.prompt import Prompt
from dspark.data.shards import read_prompts
from dspark.decoding.acceptance import AcceptanceCounter

LOOKUP = {"prompt_lookup_num_tokens": 7}


class Clock:
    """Seconds inside wrapped methods, under "outer/inner" names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(name)
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds["/".join(self._inside)] += time.perf_counter() - started
                self._inside.pop()

        setattr(owner, method, timed)


class Arm:
    """One engine whose draft pass and target forwards are timed while it decodes."""

    def __init__(self, target: LoadedTarget, draft: Path | None, batch: int) -> None:
        # Prompts repeat over rounds: a cached prefix would make later rounds another task.
        options = EngineOptions(max_requests=batch, prefix_cache=False)
        self.engine = Engine(target, draft, options=options)
        self.clock = Clock()
        runner = self.engine.core.runner
        self.clock.wrap(runner, "_prefill", "prefill")
        self.clock.wrap(runner, "_decode", "decode")
        self.clock.wrap(runner, "draft", "draft")
        self.clock.wrap(runner, "forward", "verify")
        self.clock.wrap(runner.target, "logits", "verify")
        self.tokens = self.wall = 0.0
        self.counter: AcceptanceCounter | None = None
        self.rates: list[float] = []

    def round(self, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
        """Decode ``prompts`` together."""
        started = time.perf_counter()
        done = self.engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        emitted = sum(len(c.ids) for output in done for c in output.completions)
        self.tokens += emitted
        self.wall += seconds
        self.rates.append(emitted / seconds)
        for output in done:
            if output.acceptance is not None:
                self.counter = self.counter or AcceptanceCounter(output.acceptance.block_size)
                self.counter.merge(output.acceptance)
        return [completion.ids for output in done for completion in output.completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run's folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=3, help="answers against transformers")
    parser.add_argument("--answer-tokens", type=int, default=96, help="tokens of each")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load_target_of(options.run / "draft", None, Screen())
    sets = prompt_sets(options.run, target)
    rows = [
        compare(options, target, name, prompts, batch, temperature)
        for name, prompts in sets.items()
        for batch in options.batches
        for temperature in (0.0, 1.0)
    ]
    result = {
        "what": "the embedded engine: draft against plain, and against transformers",
        **origin_of(" ".join(["python", *sys.argv])).model_dump(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "rows": rows,
        "transformers": against_transformers(options, target, sets),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def prompt_sets(run: Path, target: LoadedTarget) -> dict[str, list[list[int]]]:
    """Ids of the held-out prompts: the workload's, and all others."""
    held_out = read_prompts(run / "prompts", "held_out")
    kind = held_out[0].category

    def ids(chosen: list[Prompt]) -> list[list[int]]:
        return [prompt_ids(target.tokenizer, p.messages, p.tools) for p in chosen]

    return {
        "workload": ids([p for p in held_out if p.category == kind]),
        "general": ids([p for p in held_out if p.category != kind]),
    }


def filled(prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` prompts, repeating them as often as needed."""
    return [prompts[i % len(prompts)] for i in range(count)]


def compare(
    options: argparse.Namespace,
    target: LoadedTarget,
    name: str,
    prompts: list[list[int]],
    batch: int,
    temperature: float,
) -> dict[str, Any]:
    """Both arms of one setting, in turns."""
    asked = filled(prompts, max(batch, 4))
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=options.max_new_tokens)
    arms = {"plain": Arm(target, None, batch), "draft": Arm(target, options.run / "draft", batch)}
    for arm in arms.values():
        arm.engine.generate(asked[:1], SamplingParams(max_new_tokens=8, seed=0))
        arm.clock.seconds.clear()
    texts = {}
    for turn in range(options.rounds):
        order = list(arms) if turn % 2 == 0 else list(reversed(arms))
        for arm in order:
            texts[arm] = arms[arm].round(asked, params)
    plain, draft = arms["plain"], arms["draft"]
    counter = draft.counter
    assert counter is not None
    row = {
        "prompts": name,
        "batch": batch,
        "temperature": temperature,
        "tokens_per_second": {k: statistics.median(a.rates) for k, a in arms.items()},
        "speedup": statistics.median(d / p for d, p in zip(draft.rates, plain.rates, strict=True)),
        "acceptance_length": counter.acceptance_length,
        "share_of_limit": share_of_limit(plain, draft),
        "seconds": {k: dict(a.clock.seconds, wall=a.wall) for k, a in arms.items()},
        "identical": sum(a == b for a, b in zip(texts["plain"], texts["draft"], strict=True))
        if temperature == 0
        else None,
        "of": len(asked),
    }
    print(
        f"{name:<9} batch {batch:>2} T={temperature:g}  {row['speedup']:.2f}x  "
        f"tau {counter.acceptance_length:.2f}  share {row['share_of_limit']:.2f}",
        flush=True,
    )
    return row


def share_of_limit(plain: Arm, draft: Arm) -> float:
    """Realised speed of decoding over its limit, both per token and without prompts.

    The limit counts the draft pass and the verify forward alone against the plain forward alone.
    """

    def decode(arm: Arm) -> float:
        return arm.wall - arm.clock.seconds["prefill"]

    def core(arm: Arm) -> float:
        """Draft pass and target forwards of decode steps."""
        return arm.clock.seconds["decode/draft"] + arm.clock.seconds["decode/verify"]

    realised = (decode(plain) / plain.tokens) / (decode(draft) / draft.tokens)
    limit = (core(plain) / plain.tokens) / (core(draft) / draft.tokens)
    return realised / limit


def against_transformers(
    options: argparse.Namespace, target: LoadedTarget, sets: dict[str, list[list[int]]]
) -> list[dict[str, Any]]:
    """Batch 1, temperature 0: our plain and drafting engine and three ways of transformers."""
    model = read_model(target.files, read_config(target.files), target.dtype).eval()
    layers = model.config.num_hidden_layers
    model.generation_config.num_assistant_tokens = 7  # as many as the draft has slots
    plain, draft = Arm(target, None, 1), Arm(target, options.run / "draft", 1)

    def ours(arm: Arm) -> Callable[[list[int], int], int]:
        def decode(ids: list[int], count: int) -> int:
            params = SamplingParams(temperature=0, max_new_tokens=count)
            return len(arm.round([ids], params)[0])

        return decode

    def theirs(**extra: Any) -> Callable[[list[int], int], int]:
        return lambda ids, count: generate(model, ids, count, target, extra)

    arms = {
        "dspark plain": ours(plain),
        "dspark draft": ours(draft),
        "transformers": theirs(),
        "transformers prompt lookup": theirs(**LOOKUP),
        "transformers early exit": theirs(assistant_early_exit=layers // 4),
    }
    rows = []
    for name, prompts in sets.items():
        whole: dict[str, list[float]] = defaultdict(list)
        decoding: dict[str, list[float]] = defaultdict(list)
        for ids in filled(prompts, options.answers):
            for arm, decode in arms.items():
                first = timed(lambda: decode(ids, 1))[1]  # noqa: B023
                tokens, seconds = timed(lambda: decode(ids, options.answer_tokens))  # noqa: B023
                whole[arm].append(tokens / seconds)
                decoding[arm].append((tokens - 1) / (seconds - first))
        row = {
            "prompts": name,
            "tokens_per_second": medians(whole),
            "over_transformers": ratios(whole),
            "decoding_tokens_per_second": medians(decoding),
            "decoding_over_transformers": ratios(decoding),
        }
        rows.append(row)
        print(name, row, flush=True)
    return rows


def timed(work: Callable[[], int]) -> tuple[int, float]:
    """(result, seconds)."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {arm: statistics.median(r) for arm, r in rates.items()}


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Median over answers of each arm's speed against plain transformers' on the same answer."""
    base = rates["transformers"]
    return {
        arm: statistics.median(a / b for a, b in zip(r, base, strict=True))
        for arm, r in rates.items()
    }


@torch.inference_mode()
def generate(
    model: Any, ids: list[int], count: int, target: LoadedTarget, extra: dict[str, Any]
) -> int:
    """New tokens of a greedy ``generate``."""
    tokens = torch.tensor([ids], device=model.device)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=min(target.end_ids) if target.end_ids else 0,
        **extra,
    )
    return int(out.shape[1] - len(ids))


if __name__ == "__main__":
    main()
