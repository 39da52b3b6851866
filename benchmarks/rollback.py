"""What taking verified tokens back from recurrent states costs: three ways, on one hybrid layer.

*corrections* is what the engine does: one block solve, then one product per head for however many
tokens each request keeps. *snapshots* runs the rule token by token, keeps the state behind every
token and picks one per request. *recompute* solves the block, and once acceptance is known solves
the kept tokens again from the old state. All three give the same states; bytes are what they keep
until acceptance is known, per request and layer.

    python benchmarks/rollback.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.cli.origin import origin_of
from dspark.model.delta import l2_normalised, solve_block, state_after

REPEATS = 30


def made(requests: int, heads: int, tokens: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(requests, heads, tokens, dim, generator=generator) for _ in range(3))
    g = -torch.rand(requests, heads, tokens, dim, generator=generator)
    b = torch.rand(requests, heads, tokens, generator=generator)
    state = torch.randn(requests, heads, dim, dim, generator=generator)
    return [l2_normalised(q), l2_normalised(k), v, g, b, state]


def corrections(parts: list[Tensor], counts: Tensor) -> Tensor:
    q, k, v, g, b, state = parts
    _, updates = solve_block(q, k, v, g, b, state)
    return state_after(state, updates, counts)


def snapshots(parts: list[Tensor], counts: Tensor) -> Tensor:
    q, k, v, g, b, state = parts
    states = [state]
    for i in range(k.shape[2]):
        one = slice(i, i + 1)
        _, updates = solve_block(
            q[:, :, one], k[:, :, one], v[:, :, one], g[:, :, one], b[:, :, one], states[-1]
        )
        states.append(state_after(states[-1], updates, None))
    return torch.stack(states)[counts, torch.arange(len(counts))]


def recompute(parts: list[Tensor], counts: Tensor) -> Tensor:
    q, k, v, g, b, state = parts
    solve_block(q, k, v, g, b, state)
    kept = torch.arange(k.shape[2]) < counts.unsqueeze(-1)
    g, b = g * kept[:, None, :, None], b * kept[:, None]
    _, updates = solve_block(q, k, v, g, b, state)
    return state_after(state, updates, None)


def best(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of ``REPEATS``."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def measured(requests: int, heads: int, tokens: int, dim: int) -> dict[str, Any]:
    parts = made(requests, heads, tokens, dim)
    counts = torch.arange(requests) % tokens + 1
    wanted = corrections(parts, counts)
    ways = {
        "corrections": (corrections, heads * tokens * 3 * dim * 4),
        "snapshots": (snapshots, heads * tokens * dim**2 * 4),
        "recompute": (recompute, heads * tokens * (4 * dim + 1) * 4),
    }
    found: dict[str, Any] = {"solve alone": {"ms": round(best(partial(solve_block, *parts)), 3)}}
    for name, (way, kept) in ways.items():
        gap = float((way(parts, counts) - wanted).abs().max() / wanted.abs().max())
        assert gap < 1e-5, (name, gap)
        found[name] = {
            "ms": round(best(partial(way, parts, counts)), 3),
            "bytes_kept": kept,
        }
    sizes = {"requests": requests, "heads": heads, "tokens": tokens, "head_dim": dim}
    return {"sizes": sizes, "ways": found}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="cost of taking tokens back from states")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollback.json"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    result = {
        "what": "one recurrent layer: verify a block, then keep some of its tokens; best of "
        f"{REPEATS}, milliseconds, one thread",
        **origin_of("python benchmarks/rollback.py").model_dump(),
        "measured": [measured(8, 4, 8, 32), measured(8, 8, 8, 64), measured(2, 96, 8, 128)],
    }
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["measured"], indent=2))


if __name__ == "__main__":
    main()
