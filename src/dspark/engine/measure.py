"""How long steps take on this machine, with this target and draft: a cost table from real passes.

Made at engine start, before any request: made-up requests over pages that nobody holds yet go
through the very functions of a step. Each size is timed up to three times after one warm-up, and
the fastest counts: whatever else the machine does only adds. Sizes whose turn comes after the time
is up are left to extrapolation and to the steps to come (``dspark.decoding.cost``).

A size of B tokens is spread over as many requests as there may be, because that is how steps with
many tokens come about; ``CONTEXT`` rows are behind each, the same ones for all (rows that nobody
wrote may hold anything, and NaN is refused).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dspark.decoding.cost import CostTable, Curve
from dspark.decoding.params import SamplingParams
from dspark.decoding.sampling import RandomStreams, safe_argmax
from dspark.engine.forward import Part
from dspark.engine.pages import BlockTable
from dspark.engine.request import Request
from dspark.engine.sampler import RequestSampler
from dspark.errors import DecodingError

if TYPE_CHECKING:
    from dspark.engine.core import EngineCore

CONTEXT = 128
REPEATS = 3
# A saved table says too much where a pass takes less than its time by this factor.
TOO_SLOW = 1.5


def measure_costs(core: EngineCore, seconds: float = 4.0) -> CostTable:
    """Time drafting and verification of ``core``, which must have a draft and nothing to do.

    Takes about ``seconds``, more where one pass of each size already does.

    Raises:
        DecodingError: no draft, or requests in work.
    """
    with _made_up(core) as requests:
        most, block = len(requests), core.admission.slots + 1
        deadline = time.perf_counter() + seconds
        verify = _curve(
            sizes(min(most * block, core.options.max_batch_tokens), block),
            lambda size: _verify(core, requests, size),
            deadline,
        )
        draft = _curve(
            sizes(most, 1), lambda size: core.runner.draft(requests[:size]), deadline + seconds / 4
        )
    return CostTable(draft, verify)


def costs_hold(core: EngineCore, costs: CostTable) -> bool:
    """Whether the smallest passes are not much faster than ``costs``, saved earlier, say.

    A table may have been made while the machine did something else: decisions by it would be wrong
    for good. Passes that are slower prove nothing, the machine may be busy now.

    Raises:
        DecodingError: no draft, or requests in work.
    """
    with _made_up(core) as requests:
        block = min(core.admission.slots + 1, core.options.max_batch_tokens)
        soon = time.perf_counter() + 1.0
        verify = _curve([1, block], lambda size: _verify(core, requests, size), soon)
        draft = _curve([1], lambda size: core.runner.draft(requests[:size]), soon)
    took = [*draft.seconds, *verify.seconds]
    said = [costs.draft_seconds(1)[1], *(costs.verify_seconds(n)[n] for n in verify.at)]
    return all(now * TOO_SLOW > then for now, then in zip(took, said, strict=True))


@contextmanager
def _made_up(core: EngineCore) -> Iterator[list[Request]]:
    """``max_requests`` requests that decode, for passes that are timed."""
    if core.drafter is None or core.unfinished:
        raise DecodingError(
            expected="an engine with a draft and without requests",
            found="no draft" if core.drafter is None else "requests in work",
            where="cost measurement",
            fix="Measure before the first request.",
        )
    requests = [_request(core, number) for number in range(core.options.max_requests)]
    try:
        # Pages are shared by all; a cache or a state of its own is not.
        shared = core.target.supports_ragged and not core.target.recurrent
        filled = requests[:1] if shared else requests
        parts = [Part(r, r.prompt, 0) for r in filled]
        _, taps, span = core.runner.forward(parts)
        core.runner.write_context(taps, span, None)
        core.runner.commit(parts, [len(r.prompt) for r in filled], keep=False)
        yield requests
    finally:
        for request in requests:
            core.runner.drop(request)


def sizes(most: int, block: int) -> list[int]:
    """Rising sizes from 1 to ``most``: all up to one block, then by halves again as much."""
    found = set(range(1, min(block, most) + 1)) | {most}
    size = 2
    while size < most:
        found |= {size, size + size // 2} if size + size // 2 < most else {size}
        size *= 2
    return sorted(found)


def _curve(at: list[int], run: Callable[[int], object], deadline: float) -> Curve:
    """Least seconds of ``run`` at each size, smallest first."""
    times: dict[int, list[float]] = {}
    run(at[0])
    for size in at:
        if times and time.perf_counter() > deadline:
            break
        run(size)
        times[size] = list(_timed(run, size, deadline))
    return Curve(tuple(times), tuple(min(t) for t in times.values()))


def _timed(run: Callable[[int], object], size: int, deadline: float) -> Iterator[float]:
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() > deadline:
            return
        started = time.perf_counter()
        run(size)
        yield time.perf_counter() - started


def _verify(core: EngineCore, requests: list[Request], size: int) -> None:
    """Everything of a step but its draft, for ``size`` tokens."""
    count = min(size, len(requests))
    parts = []
    for number, request in enumerate(requests[:count]):
        length = size // count + (number < size % count)
        parts.append(Part(request, [request.output[-1]] * length, request.length - 1))
    final, taps, span = core.runner.forward(parts)
    safe_argmax(core.target.logits(final)).tolist()
    core.runner.write_context(taps, span, None)


def _request(core: EngineCore, number: int) -> Request:
    """A decoding request in the first pages, which nobody holds."""
    assert core.drafter is not None
    pool, block = core.pool, core.drafter.block_size + 1
    length = max(1, min(CONTEXT, core.scheduler.max_length - block - 1))
    needed = -(-(length + block) // pool.page_size)
    pages = [page % pool.count for page in range(needed)]
    request = Request(f"measured/{number}", [0] * length, 2 * block, output=[0])
    request.table = BlockTable(pages=pages)
    request.status = "decoding"
    sampler = RequestSampler(SamplingParams(scheduler="fixed"), "greedy", RandomStreams(0))
    core.runner.samplers[request] = sampler
    core.admission.open(request, sampler)
    return request
