"""``dspark verify``: prove that drafting does not change what comes out, on this machine.

Four proofs, each with a bound; the command fails when one is missed:

1. Enumeration of every verification rule on toy distributions, with every scheduler: joint error at
   most 1e-12.
2. Chi-square tests of the real engine on a tiny model, every mode under every sampling setting:
   smallest p, after Bonferroni's correction for the number of cases, at least 1e-4.
3. Identity: at temperature 0 and in float32 the text with the draft is the text without it, on
   prompts of a draft folder or of the tiny model. Every prompt must be identical (in bfloat16 the
   count is reported and is no bound).
4. Random streams: no value drawn twice, no correlation beyond chance.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dspark.api import Engine
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.config.engine import EngineOptions
from dspark.data.chat import prompt_ids
from dspark.data.sources import file_prompts
from dspark.decoding.enumeration import BLOCK, MODES, Width, honest, joint_error, width_by_prefix
from dspark.decoding.enumeration_schedule import SCHEDULERS, largest_error
from dspark.engine import selftest
from dspark.engine.core import EngineCore
from dspark.errors import ConfigError

JOINT_ERROR, P_VALUE = 1e-12, 1e-4
SEEDS, SCHEDULED_SEEDS = range(6), range(2)
TOKENS = 64
STREAMS, DRAWS = 64, 2000


@dataclass
class Proofs:
    """What was found; see the module docstring."""

    max_joint_error: float
    scheduler_error: float
    cases: list[selftest.CaseResult]
    prompts: int
    identical: int
    dtype: str
    drawn_twice: int
    correlation: float

    @property
    def samples(self) -> int:
        return sum(result.samples for result in self.cases)

    @property
    def min_p_value(self) -> float:
        """Smallest p over all cases, times their number."""
        return min(1.0, min(r.p_value for r in self.cases) * len(self.cases))

    def missed(self) -> list[str]:
        """Bounds that do not hold."""
        checks = {
            f"joint error above {JOINT_ERROR:g}": self.max_joint_error <= JOINT_ERROR,
            f"scheduled joint error above {JOINT_ERROR:g}": self.scheduler_error <= JOINT_ERROR,
            f"p below {P_VALUE:g} after Bonferroni": self.min_p_value >= P_VALUE,
            # In bfloat16 a forward of eight tokens rounds otherwise than eight of one.
            "greedy texts that differ": self.identical == self.prompts or self.dtype != "float32",
            "random streams that overlap": not self.drawn_twice
            and self.correlation < 6 / math.sqrt(DRAWS),
        }
        return [name for name, holds in checks.items() if not holds]

    def as_json(self) -> dict[str, Any]:
        return {
            "max_joint_error": self.max_joint_error,
            "schedulers": {
                "names": list(SCHEDULERS),
                "modes": list(MODES),
                "max_joint_error": self.scheduler_error,
            },
            "min_p_value": self.min_p_value,
            "samples": self.samples,
            "identity": {
                "prompts": self.prompts,
                "identical": self.identical,
                "dtype": self.dtype,
            },
            "streams": {"drawn_twice": self.drawn_twice, "correlation": self.correlation},
            "cases": [
                {
                    "name": r.case.name,
                    "verification": r.case.verification,
                    "draft_sample_method": r.case.draft,
                    "setting": r.case.setting,
                    "truncate_draft": r.case.truncate,
                    "scheduler": r.case.scheduler,
                    "hybrid": r.case.hybrid,
                    "samples": r.samples,
                    "cells": r.cells,
                    "chi_square": r.statistic,
                    "p_value": r.p_value,
                    "acceptance_length": r.acceptance_length,
                }
                for r in self.cases
            ],
            "missed": self.missed(),
        }


def verify(
    draft: Path | None,
    target: str | None,
    prompts: Path | None,
    samples: int,
    *,
    as_json: bool,
) -> None:
    """Run the proofs and print them; exit code 1 when a bound is missed.

    Args:
        draft: folder of a draft whose texts are compared; None uses the tiny model.
        target: instead of the one the draft's provenance names.
        prompts: JSON Lines with ``prompt``, ``messages`` or ``turns``; needs a draft.
        samples: texts per chi-square case.
    """
    if samples < 1000:
        raise ConfigError(
            expected="at least 1000 samples, or no cell of the test is filled",
            found=str(samples),
            where="dspark verify --samples",
            fix="Leave it out for 100,000.",
        )
    screen = Screen(Console(stderr=True))
    plain, drafting, asked = _engines(draft, target, prompts, screen)
    with screen.bar("greedy texts", None):
        identical = selftest.identity(plain, drafting, asked, TOKENS)
    with screen.bar("enumeration", None):
        error = max(joint_error(*case) for case in _enumerated())
        scheduled = largest_error(SCHEDULED_SEEDS)
    results = _sampled(samples, screen)
    twice, correlation = selftest.stream_overlap(STREAMS, DRAWS)
    dtype = str(plain.target.dtype).removeprefix("torch.")
    proofs = Proofs(error, scheduled, results, len(asked), identical, dtype, twice, correlation)
    if as_json:
        typer.echo(json.dumps(proofs.as_json(), indent=2))
    else:
        _show(proofs, Console())
    if proofs.missed():
        raise typer.Exit(1)


def _sampled(samples: int, screen: Screen) -> list[selftest.CaseResult]:
    """All cases, as many at once as there are cores; each is the same alone."""
    cases = selftest.all_cases()
    workers = min(len(os.sched_getaffinity(0)), len(cases))
    with (
        screen.bar("sampled texts", len(cases) * samples) as bar,
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
    ):
        running = [pool.submit(_one_case, case, samples) for case in cases]
        try:
            for _ in as_completed(running):
                bar.advance(samples)
            return [done.result() for done in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_case(case: selftest.Case, samples: int) -> selftest.CaseResult:
    """In a process of its own, on one thread: the model is tiny."""
    torch.set_num_threads(1)
    return selftest.run_case(selftest.tiny_pair(hybrid=case.hybrid), case, samples)


def _enumerated() -> Iterator[tuple[Any, Width]]:
    """Every mode with every fixed width, and with one chosen from the prefix."""
    for mode in MODES:
        for seed in SEEDS:
            for width in range(BLOCK + 1):
                yield honest(mode, seed), _always(width)
            if mode != "greedy":
                yield honest(mode, seed), width_by_prefix


def _always(width: int) -> Width:
    return lambda _: width


def _engines(
    draft: Path | None, target: str | None, prompts: Path | None, screen: Screen
) -> tuple[EngineCore, EngineCore, list[list[int]]]:
    """Without and with a draft, and the prompts to compare them on."""
    if draft is None:
        if target is not None or prompts is not None:
            raise ConfigError(
                expected="a draft folder with --target or --prompts",
                found="none",
                where="dspark verify",
                fix="dspark verify DRAFT --prompts FILE",
            )
        model, drafter = selftest.tiny_pair()
        ends = frozenset({selftest.END})
        cores = EngineCore(model, None, ends), EngineCore(model, drafter, ends)
        return *cores, selftest.tiny_prompts(100)
    loaded = load_target_of(draft, target, screen)
    options = EngineOptions(prefix_cache=False)
    drafting, plain = Engine(loaded, draft, options=options), Engine(loaded, options=options)
    if prompts is None:
        texts: list[Any] = [[{"role": "user", "content": text}] for text in PROMPTS]
    else:
        texts = [prompt.messages for prompt in file_prompts(prompts)]
    return plain.core, drafting.core, [prompt_ids(loaded.tokenizer, text) for text in texts]


PROMPTS = (
    "Copy this line exactly: id=7f3a-99b1; user=mia_42; path=/var/log/app-01.txt",
    "Repeat the word `identifier_x1` ten times, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 apples each and gives 7 apples away. How many are left?",
    'Answer with JSON only: {"name": "Ben", "age": 31, "city": "Oslo"} with the age plus one.',
    "Explain in three sentences why the sky is blue.",
    "Translate into French: The train leaves at nine o'clock from platform two.",
    "List the first twelve prime numbers.",
)
"""Copies, code, sums, JSON and prose: where verification has changed text elsewhere."""


def _show(proofs: Proofs, console: Console) -> None:
    table = Table(
        title="sampled texts against the target's exact distribution", title_justify="left"
    )
    for name in ("case", "samples", "cells", "chi-square", "p", "acceptance"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for r in proofs.cases:
        table.add_row(
            r.case.name,
            f"{r.samples:,}",
            str(r.cells),
            f"{r.statistic:.1f}",
            f"{r.p_value:.3g}",
            f"{r.acceptance_length:.2f}",
        )
    console.print(table)
    lines = [
        ("enumeration", f"largest joint error {proofs.max_joint_error:.2g} (at most 1e-12)"),
        (
            "schedulers",
            f"largest joint error {proofs.scheduler_error:.2g}, {len(SCHEDULERS)} of them",
        ),
        ("sampling", f"smallest p {proofs.min_p_value:.2g} after Bonferroni (at least 1e-4)"),
        ("identity", f"{proofs.identical} of {proofs.prompts} greedy texts ({proofs.dtype})"),
        ("streams", f"{proofs.drawn_twice} values twice, correlation {proofs.correlation:.3f}"),
        ("missed", ", ".join(proofs.missed()) or "nothing"),
    ]
    for name, text in lines:
        console.print(f"[bold]{name:>12}[/]  {text}", highlight=False)
