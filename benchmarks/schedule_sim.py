"""Schedulers on recorded confidences, without a model: what load does to them.

    python benchmarks/schedule_sim.py --json [--out benchmarks/results/schedule_sim.json]

Replays blocks that ``record_blocks.py`` took from a real draft: 1 to 4096 requests at once, each
walking through the blocks of a recorded answer; when an answer ends another one arrives in its
place. A step drafts for everybody, admits by a scheduler, emits what the record says was accepted
among the admitted (and one token more), and takes what a cost curve says. Confidences are
calibrated on the record itself.

Simplifications: a request goes on to its next recorded block however much of this one was admitted,
and a block that block verification accepted counts from its front.

Curves give the seconds of a step by verified tokens:

* ``smooth``    memory-bound at first, bent into compute-bound
* ``jagged``    the same in stairs of 64 tokens, and cliffs behind 256 and 1024
* ``measured``  this repository's engine on the machine named in ``scheduler_costs.json``
* ``h200``      made up after that GPU's datasheet for a dense 8B model in bf16: weights read at
                4.8 TB/s, 790 TFLOP/s at 60 %, batches padded to sizes that graphs are captured for

``oracle`` knows which tokens will be accepted and admits the best number of them; ``share`` is the
throughput of a scheduler as a part of the oracle's. ``scheduling_us_512x7`` is the time of one
``sync`` decision over 512 requests of 7 slots, survivals included: the median of many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dspark.cli.origin import machine, marked_commit, versions
from dspark.decoding import schedule
from dspark.decoding.calibration import calibrated, fit
from dspark.decoding.cost import CostTable
from dspark.decoding.schedule import Floats, Ints

RESULTS = Path(__file__).parent / "results"
NAMES = ("fixed", "threshold", "sync", "async", "oracle")
REQUESTS = tuple(2**n for n in range(13))
MOST = 8 * REQUESTS[-1]
THRESHOLD = 0.3


def smooth() -> Floats:
    tokens = np.arange(MOST + 1)
    return 1e-3 * np.sqrt(20.0**2 + (tokens * 20.0 / 400.0) ** 2)


def jagged() -> Floats:
    tokens = np.arange(MOST + 1)
    stairs = np.minimum(-(-tokens // 64) * 64, MOST)
    return smooth()[stairs] * (1.0 + 0.35 * (tokens > 256) + 0.25 * (tokens > 1024))


def h200() -> Floats:
    tokens = np.arange(MOST + 1)
    graphs = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)])
    padded = np.where(
        tokens <= 512, graphs[np.searchsorted(graphs, np.minimum(tokens, 512))], tokens
    )
    parameters = 8e9
    read = 2 * parameters / 4.8e12
    compute = 2 * parameters * np.ceil(padded / 64) * 64 / (790e12 * 0.6)
    # Beyond the largest captured batch every kernel is launched by hand.
    return np.maximum(read, compute) + 4e-4 + 1.5e-3 * (tokens > 512)


def measured() -> tuple[Floats, Floats]:
    table = CostTable.from_json(json.loads((RESULTS / "scheduler_costs.json").read_text())["costs"])
    return table.verify_seconds(MOST), table.draft_seconds(REQUESTS[-1])


def curves() -> dict[str, tuple[Floats, Floats]]:
    """(verify [MOST + 1], draft [requests + 1]) seconds by name; made-up drafts cost a tenth of
    verifying their block."""
    made = {"smooth": smooth(), "jagged": jagged(), "h200": h200()}
    blocks = 7 * np.arange(REQUESTS[-1] + 1)
    return {name: (v, 0.1 * v[blocks]) for name, v in made.items()} | {"measured": measured()}


class Replay:
    """``survival`` [N, K] and ``accepted`` [N] of recorded blocks; ``following`` [N] is the next
    block of the same answer, or -1."""

    def __init__(self, path: Path) -> None:
        raw = json.loads(path.read_text(encoding="utf-8"))
        rows = [(*b, n) for n, a in enumerate(raw["answers"]) for b in a["blocks"]]
        data = np.array(rows)
        logits, accepted = data[:, :-2], data[:, -2].astype(np.int64)
        answers = data[:, -1].astype(np.int64)
        temperatures = fit(logits, accepted, answers).temperatures
        self.survival = schedule.survivals(calibrated(logits, temperatures))
        self.accepted = accepted
        self.following = np.arange(1, len(data) + 1)
        self.following[np.append(answers[1:] != answers[:-1], True)] = -1
        self.starts = np.flatnonzero(np.append(True, answers[1:] != answers[:-1]))

    def begin(self, requests: int, numbers: np.random.Generator) -> Ints:
        """Requests somewhere in their answers."""
        return numbers.integers(0, len(self.accepted), requests)

    def advance(self, at: Ints, numbers: np.random.Generator) -> Ints:
        """The next block of each; a finished answer makes room for a new one."""
        after = self.following[at]
        arrivals = self.starts[numbers.integers(0, len(self.starts), len(at))]
        return np.where(after < 0, arrivals, after)


def widths_of(name: str, live: Floats, accepted: Ints, old: Floats, seconds: Floats) -> Ints:
    if name == "threshold":
        return schedule.threshold(live, THRESHOLD)
    if name == "sync":
        return schedule.sync(live, seconds)
    if name == "async":
        return schedule.top(live, schedule.budget(old, seconds))
    if name == "oracle":
        known = (np.arange(live.shape[1]) < accepted[:, None]).astype(np.float64)
        return schedule.top(known, schedule.budget(known, seconds))
    return schedule.fixed(live)


def simulate(
    replay: Replay, name: str, requests: int, verify: Floats, draft: Floats
) -> tuple[float, float]:
    """(tokens a second, admitted tokens per request and step)."""
    numbers = np.random.default_rng(requests)
    at = replay.begin(requests, numbers)
    old = [replay.survival[at]] * 2
    seconds = verify + draft[requests]
    emitted, spent, admitted = 0, 0.0, 0
    steps = max(40, 6000 // requests)
    for _ in range(steps):
        live, accepted = replay.survival[at], replay.accepted[at]
        widths = widths_of(name, live, accepted, old[0], seconds)
        old = [old[1], live]
        emitted += requests + int(np.minimum(widths, accepted).sum())
        admitted += int(widths.sum())
        spent += float(seconds[requests + int(widths.sum())])
        at = replay.advance(at, numbers)
    return emitted / spent, admitted / steps / requests


def plain(requests: int, verify: Floats) -> float:
    return requests / float(verify[requests])


def scheduling_us(run: Callable[[], object], repeats: int = 2000) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result")
    parser.add_argument("--blocks", type=Path, default=RESULTS / "recorded_blocks.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    replay = Replay(options.blocks)
    numbers = np.random.default_rng(0)
    raw = numbers.beta(4, 1, (512, 7))
    seconds = smooth()
    took = scheduling_us(lambda: schedule.sync(schedule.survivals(raw), seconds))
    out: dict[str, Any] = {"scheduling_us_512x7": round(took, 1), "curves": {}}
    out |= {"requests": list(REQUESTS), "plain": {}, "per_user": {}, "admitted": {}, "share": {}}
    for curve, (verify, draft) in curves().items():
        found = {n: [simulate(replay, n, r, verify, draft) for r in REQUESTS] for n in NAMES}
        rates = {n: [rate for rate, _ in rows] for n, rows in found.items()}
        out["curves"][curve] = {n: [round(x, 2) for x in v] for n, v in rates.items()}
        out["plain"][curve] = [round(plain(r, verify), 2) for r in REQUESTS]
        out["per_user"][curve] = {
            n: [round(x / r, 3) for x, r in zip(v, REQUESTS, strict=True)] for n, v in rates.items()
        }
        out["admitted"][curve] = {n: [round(k, 3) for _, k in rows] for n, rows in found.items()}
        out["share"][curve] = {
            n: [round(x / y, 3) for x, y in zip(v, rates["oracle"], strict=True)]
            for n, v in rates.items()
        }
    out |= {"machine": machine(), "commit": marked_commit(), "versions": versions()}
    out["command"] = "python benchmarks/schedule_sim.py --json"
    if options.out is not None:
        options.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(out))
    else:
        for curve, rows in out["curves"].items():
            print(curve)
            for name in NAMES:
                print(f"  {name:<10}", *(f"{x:>9.0f}" for x in rows[name]))


if __name__ == "__main__":
    main()
