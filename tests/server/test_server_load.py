"""Load on loopback: the server keeps the engine's pace, and its memory stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import environment
from dspark import Engine, SamplingParams
from dspark.config.engine import EngineOptions
from server.load import load
from server.made_pair import make
from server.serving import MODEL, serving

MEMORY = Path(__file__).with_name("load_memory.py")
BATCH, PROMPTS, TOKENS, ROUNDS = 8, 16, 96, 12


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_throughput_is_within_five_percent_of_the_offline_engine(tmp_path: Path) -> None:
    """Needs a quiet machine with two cores: one for the engine, one for clients and sockets. The
    clients are made to cost nearly nothing (see ``load_client``), and that is checked."""
    target, draft = make(tmp_path, hidden=384, layers=8)
    options = EngineOptions(max_requests=BATCH, prefix_cache=False)
    engine = Engine(str(target), draft, options=options, device="cpu")
    chats = [[{"role": "user", "content": f"number {i}"}] for i in range(PROMPTS)]
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    bodies = [
        {"model": MODEL, "messages": chat, "max_tokens": TOKENS, "ignore_eos": True,
         "temperature": 0, "return_token_ids": True}
        for chat in chats
    ]  # fmt: skip

    costs: dict[str, list[float]] = {"offline": [], "whole": [], "streamed": []}

    def offline() -> float:
        start = time.perf_counter()
        outputs = engine.generate(chats, params)
        seconds = time.perf_counter() - start
        assert all(len(o.completions[0].ids) == TOKENS for o in outputs)
        return PROMPTS * TOKENS / seconds

    speeds: dict[str, list[float]] = {"offline": [], "whole": [], "streamed": []}
    firsts: list[float] = []
    each: list[float] = []
    clients: list[float] = []
    with serving(engine) as served:
        offline()
        for _ in range(ROUNDS):
            begun = time.process_time()
            speeds["offline"].append(offline())
            costs["offline"].append(time.process_time() - begun)
            for kind in ("whole", "streamed"):
                asked = [{**body, "stream": kind == "streamed"} for body in bodies]
                begun = time.process_time()
                found = load(served, asked, clients=2 * BATCH)
                costs[kind].append(time.process_time() - begun)
                served.idle()
                assert found["tokens"] == PROMPTS * TOKENS
                speeds[kind].append(found["tokens"] / found["seconds"])
                clients.append(found["cpu"] / found["seconds"])
                firsts += found["first"]
                each += found["each"]
    show("TTFT", firsts)
    show("TPOT", each)
    print(f"clients: {max(clients):.1%} of a core at most")
    assert max(clients) < 0.15, "the clients are the bottleneck, not the server"
    judge(speeds, costs)


def show(name: str, values: list[float]) -> None:
    spread = [f"p{int(100 * s)} {1000 * percentile(values, s):.1f} ms" for s in (0.5, 0.9, 0.99)]
    print(f"{name}: {', '.join(spread)}")


def judge(speeds: dict[str, list[float]], costs: dict[str, list[float]]) -> None:
    """Tokens per second and CPU seconds of each kind, against the engine without HTTP."""
    for kind, values in speeds.items():
        print(f"{kind}: {', '.join(f'{value:.0f}' for value in values)} tokens per second")
    # Whatever else the machine does only ever slows a round down.
    least = {kind: min(values) for kind, values in costs.items()}
    best = {kind: max(values) for kind, values in speeds.items()}
    for kind in ("whole", "streamed"):
        more = least[kind] / least["offline"] - 1
        print(f"{kind}: {more:.1%} more CPU time than offline")
        assert more < 0.1, least
    for kind in ("whole", "streamed"):
        assert best[kind] >= 0.95 * best["offline"], best


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_five_thousand_requests(made_pair: tuple[Path, Path]) -> None:
    """Once caches are full: pages of a small pool, compiled grammars, tokens' texts. A leak of 4 KiB
    a request would show. oneDNN's code for shapes is left out, see ``load_memory``."""
    done = subprocess.run(
        [sys.executable, str(MEMORY), *map(str, made_pair)], text=True, capture_output=True,
        env={**environment(), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    print(f"MiB after each 500: {[m // 2**20 for m in memory]}")
    assert len(memory) == 10
    assert memory[-1] - memory[2] < 12 * 2**20, memory
