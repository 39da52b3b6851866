"""Schedulers on recorded confidences, without a model: what load does to them.

    python benchmarks/schedule_sim.py --json [--out benchmarks/results/schedule_sim.json]

Replays blocks that ``record_blocks.py`` took from a real draft: 1 to 4096 requests at once, each
walking through the blocks of a recorded answer; when an answer ends another one arrives in its
place. A step drafts, admits by a scheduler, emits what the record says was accepted among the
admitted (and one token more), and takes what a cost curve says. Confidences are calibrated on the
record itself. ``fixed`` and ``threshold`` draft for everybody; ``sync`` and ``async`` leave out
requests whose earlier blocks say that drafting does not pay, and try them again after 4 steps, 8,
16 and so on to 64, as the engine does. Steps take what the curve says, so nothing is owed
(``dspark.engine.history.Debt``).

Simplifications: a request goes on to its next recorded block however much of this one was admitted,
and a block that block verification accepted counts from its front.

Curves give the seconds of a step by verified tokens:

* ``smooth``    memory-bound at first, bent into compute-bound
* ``jagged``    the same in stairs of 64 tokens, and cliffs behind 256 and 1024
* ``measured``  this repository's engine on the machine named in ``scheduler_costs.json``
* ``h200``      made up after that GPU's datasheet for a dense 8B model in bf16: weights read at
                4.8 TB/s, 790 TFLOP/s at 60 %, batches padded to sizes that graphs are captured for

``oracle`` knows which tokens will be accepted: it drafts for the best number of requests and
admits just those tokens; ``share`` is the throughput of a scheduler as a part of the oracle's.
``scheduling_us_512x7`` is the time of one
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
from numpy.typing import NDArray

from dspark.cli.origin import origin_of
from dspark.decoding import schedule
from dspark.decoding.calibration import calibrated, fit
from dspark.decoding.cost import CostTable
from dspark.decoding.schedule import Floats, Ints
from dspark.engine.history import FIRST_WAIT, MOST_WAIT

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

    def advance(self, at: Ints, numbers: np.random.Generator) -> tuple[Ints, NDArray[np.bool_]]:
        """The next block of each, and which are new: a finished answer makes room for another."""
        after = self.following[at]
        arrivals = self.starts[numbers.integers(0, len(self.starts), len(at))]
        return np.where(after < 0, arrivals, after), after < 0


class Policy:
    """Widths [R] and the number of requests that draft, step after step."""

    def __init__(self, name: str, requests: int, verify: Floats, draft: Floats) -> None:
        self.name, self.requests, self.verify, self.draft = name, requests, verify, draft
        self.mean = np.zeros((requests, 7))
        self.old: list[Floats] = []
        self.new = np.ones(requests, dtype=np.bool_)
        self.probed = self.new.copy()
        self.idle, self.wait = np.zeros(requests), np.full(requests, FIRST_WAIT)

    def widths(self, live: Floats, accepted: Ints) -> tuple[Ints, int]:
        if self.name == "oracle":
            return self._oracle(accepted)
        if self.name == "threshold":
            return schedule.threshold(live, THRESHOLD), self.requests
        if self.name == "fixed":
            return schedule.fixed(live), self.requests
        drafts = self._drafts()
        count = int(drafts.sum())
        seconds = self.verify + self.draft[count]
        shown = np.where(drafts[:, None], live, 0.0)
        if self.name == "sync":
            widths = schedule.sync(shown, seconds)
        else:
            old = np.where(drafts[:, None], self.old[0], 0.0) if len(self.old) == 2 else shown
            widths = schedule.top(shown, schedule.budget(old, seconds))
        self._learn(live, drafts)
        return widths, count

    def _drafts(self) -> NDArray[np.bool_]:
        """Decided before the block: by the mean of what each request drafted so far."""
        worth = schedule.worth_drafting(
            self.mean, self.draft, self.verify, tokens=self.requests, emitted=float(self.requests)
        )
        longer = np.where(self.probed, np.minimum(2 * self.wait, MOST_WAIT), self.wait)
        self.wait = np.where(worth, FIRST_WAIT, longer)
        self.probed = self.new | (~worth & (self.idle >= self.wait))
        return worth | self.probed

    def arrive(self, new: NDArray[np.bool_]) -> None:
        """These requests are others now."""
        self.new = new
        self.wait[new] = FIRST_WAIT

    def _learn(self, live: Floats, drafts: NDArray[np.bool_]) -> None:
        self.mean[self.new] = live[self.new]
        self.mean[drafts] += 0.3 * (live[drafts] - self.mean[drafts])
        self.idle = np.where(drafts, 0, self.idle + 1)
        # A block that was not drafted told nothing: what is known of the request stays.
        self.old = [*self.old[-1:], np.where(drafts[:, None], live, self.mean)]

    def _oracle(self, accepted: Ints) -> tuple[Ints, int]:
        order = np.argsort(-accepted, kind="stable")
        gained = np.concatenate([[0], np.cumsum(accepted[order])])
        count = np.arange(self.requests + 1)
        rate = (self.requests + gained) / (self.draft[count] + self.verify[self.requests + gained])
        best = int(rate.argmax())
        widths = np.zeros(self.requests, dtype=np.int64)
        widths[order[:best]] = accepted[order[:best]]
        return widths, best


def simulate(
    replay: Replay, name: str, requests: int, verify: Floats, draft: Floats
) -> tuple[float, float]:
    """(tokens a second, admitted tokens per request and step)."""
    numbers = np.random.default_rng(requests)
    at = replay.begin(requests, numbers)
    policy = Policy(name, requests, verify, draft)
    emitted, spent, admitted = 0, 0.0, 0
    steps = max(40, 6000 // requests)
    for _ in range(steps):
        live, accepted = replay.survival[at], replay.accepted[at]
        widths, drafting = policy.widths(live, accepted)
        emitted += requests + int(np.minimum(widths, accepted).sum())
        admitted += int(widths.sum())
        spent += float(draft[drafting] + verify[requests + int(widths.sum())])
        at, new = replay.advance(at, numbers)
        policy.arrive(new)
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
    out |= origin_of("python benchmarks/schedule_sim.py --json").model_dump()
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
