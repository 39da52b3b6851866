"""A whole run's results, made up: plausible curves, counters that add up, always the same."""

from __future__ import annotations

import math
from typing import Any

BLOCK = 7


def made_summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for group, speedup in (("workload", 1.62), ("general", 0.94)):
        for temperature in (0, 1):
            own = [a for a in arms if a["group"] == group and a["temperature"] == temperature]
            length = 1 + sum(a["accepted"] for a in own) / sum(a["steps"] for a in own)
            ratio = speedup - 0.11 * temperature
            rows.append(
                {
                    "prompts": group,
                    "temperature": temperature,
                    "acceptance_length": length,
                    "ci95": [length - 0.17, length + 0.19],
                    "tokens_per_second": {"plain": 31.27, "draft": 31.27 * ratio},
                    "speedup": ratio,
                    "identical_to_plain": [16, 16] if temperature == 0 else None,
                }
            )
    return {
        "seconds_total": 3187.4,
        "results": rows,
        "name": "word-problems-135m",
        "target": "package:tiny-chat-135m",
        "workload_description": "Maths word problems from our own seeded generator: short, regular"
        " texts that are much easier to draft than open conversation.",
        "stage_seconds": {
            "prompts": 2.1,
            "regenerate": 611.0,
            "capture": 208.4,
            "train": 1799.8,
            "bench": 540.2,
        },
        "versions": {"dspark": "0.1.0", "torch": "2.13.0", "python": "3.12.4"},
        "command": "dspark run recipes/word-problems.yaml output=runs/a",
        "commit": "8919b47c0ffee",
        "stages": {
            "train": made_record("3d1fa11+dirty", ["killed", "interrupted", "finished"]),
            "bench": made_record("8919b47c0ffee", ["finished"]),
        },
        "machine": {"cpu": "2 cores", "memory": "8 GiB", "accelerator": "none"},
        "verification": "block",
        "draft_sample_method": "probabilistic",
        "dtype": "float32",
        "block_size": BLOCK,
    }


def made_record(commit: str, ends: list[str]) -> dict[str, Any]:
    """How a stage was made, as in its manifest."""
    origin = {
        "command": "dspark run recipes/word-problems.yaml output=runs/a",
        "commit": commit,
        "versions": {"dspark": "0.1.0", "torch": "2.13.0", "python": "3.12.4"},
        "machine": {"cpu": "2 cores", "memory": "8 GiB", "accelerator": "none"},
    }
    started = "2026-01-05T10:00:00.000000+00:00"
    times = {"started": started, "seconds": 540.2, "loading": 0.0}
    attempts = [{**origin, **times, "ended": ended} for ended in ends]
    return {**origin, **times, "attempts": attempts}


def made_pieces() -> list[dict[str, str]]:
    words = (
        "Ann",
        "has",
        "12",
        "apples",
        "and",
        "gives",
        "5",
        "away",
        ",",
        "so",
        "7",
        "remain",
        ".",
    )
    kinds = ["accepted"] * 5 + ["corrected"] + ["accepted"] * 7 + ["bonus"]
    return [{"text": f" {w}", "kind": kinds[i % len(kinds)]} for i, w in enumerate(words * 3)]


def made_arm(category: str, group: str, temperature: int, start: float) -> dict[str, Any]:
    steps = 400
    counts = [int(steps * start * (0.86 - 0.03 * temperature) ** k) for k in range(BLOCK)]
    accepted = sum(counts)
    length = 1 + accepted / steps
    prompts = [
        {
            "id": f"{category}-{i}",
            "acceptance_length": max(1.0, length + 0.8 * math.sin(2.4 * i + temperature)),
            "steps": 25,
            "tokens": 80 + i,
        }
        for i in range(16)
    ]
    return {
        "category": category,
        "group": group,
        "temperature": temperature,
        "prompt_count": 16,
        "acceptance_length": length,
        "ci95": [length - 0.2, length + 0.22],
        "per_slot_acceptance": [c / steps for c in counts],
        "drafted": steps * BLOCK,
        "admitted": steps * BLOCK - 31,
        "accepted": accepted,
        "steps": steps,
        "tokens": steps + accepted,
        "prompts": prompts,
        "tokens_per_second": {
            "plain": 31.2,
            "draft": 44.4,
            "plain_repeats": [31.0, 31.2, 31.9],
            "draft_repeats": [44.4, 43.7, 45.1],
        },
        "identical": [16, 16] if temperature == 0 else None,
        "sample": {"prompt": "Ann has 12 apples.\nHow many?", "pieces": made_pieces()},
    }


def made_bench() -> dict[str, Any]:
    kinds = (("maths", "workload", 0.86), ("code", "general", 0.46), ("chat", "general", 0.36))
    return {"arms": [made_arm(c, g, t, s - 0.04 * t) for c, g, s in kinds for t in (0, 1)]}


def made_training() -> dict[str, Any]:
    def losses(step: int, wobble: float) -> dict[str, float]:
        fall = math.exp(-step / 160)
        noise = wobble * math.sin(step * 12.9898) * math.cos(step * 3.7)
        ce, l1, bce = 1.3 + 4.6 * fall + noise, 0.62 + 1.1 * fall + noise / 4, 0.41 + 0.27 * fall
        return {"ce": ce, "l1": l1, "confidence": bce + noise / 9}

    steps = []
    for step in range(600):
        terms = losses(step, 0.9)
        loss = 0.1 * terms["ce"] + 0.9 * terms["l1"] + terms["confidence"]
        extra = {"learning_rate": 6e-4 * (1 - step / 600), "tokens": 4096 * (step + 1)}
        norm = 0.6 + 3 * math.exp(-step / 60) + 0.2 * abs(math.sin(step * 7.1))
        steps.append(
            {"step": step, "seconds": 3.0 * step, "loss": loss, "grad_norm": norm, **terms, **extra}
        )
    evals = []
    for step in range(0, 601, 60):
        learned = 1 - math.exp(-step / 160)
        rates = [0.05 + (0.79 - 0.015 * k) * learned for k in range(BLOCK)]
        greedy = [r + 0.04 * learned for r in rates]
        tau = 1 + sum(math.prod(rates[: k + 1]) for k in range(BLOCK))
        evals.append(
            {
                "step": step,
                "seconds": 3.0 * step,
                **losses(step, 0.0),
                "accept_rate": rates,
                "greedy_agreement": greedy,
                "tau_all": tau,
                "tau_full": tau + 0.08,
                "by_category": {"maths": tau + 0.4, "code": 1 + (tau - 1) * 0.5},
                "confidence_bias": -0.021,
                "outside": 0.0371,
                "confidence_abs_error": 0.113,
                "grad_share": {"ce": 0.14, "l1": 0.61 + 0.1 * learned, "confidence": 0.25},
            }
        )
    return {"steps": steps, "evals": evals}


def made_lineage() -> dict[str, Any]:
    names = ["prompts", "answers", "states", "draft"]
    prints = {n: f"{i}f3a9c{i}d77be{i}412aa90" for i, n in enumerate(names)}
    return {
        "artifacts": [
            {
                "artifact": name,
                "kind": name,
                "fingerprint": prints[name],
                "parents": {names[i - 1]: prints[names[i - 1]]} if i else {},
            }
            for i, name in enumerate(names)
        ]
    }


def made_run() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    bench = made_bench()
    return made_summary(bench["arms"]), bench, made_training(), made_lineage()
