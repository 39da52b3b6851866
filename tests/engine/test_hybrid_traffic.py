"""Random traffic over a hybrid target: at every moment all states are those of plain decoding.

The real engine runs, with a cache so small that preemption and eviction are daily business. After
every step each running request's recurrent and convolution states, and every kept state, are
compared with one plain forward over the text they stand for; texts are compared at the end.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    rule,
    run_state_machine_as_test,
)

from dspark.decoding.params import SamplingParams
from engine.hybrid_pairs import VOCAB, HybridPair, check_state, settled_states

PAIR = HybridPair.of()
PLAIN: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}


def plain_text(prompt: list[int], limit: int) -> tuple[int, ...]:
    """The greedy answer of an engine that has nothing else to do and no draft."""
    key = (tuple(prompt), limit)
    if key not in PLAIN:
        core = PAIR.engine(draft=False, max_requests=1, prefix_cache=False)
        name = core.submit(prompt, SamplingParams(max_new_tokens=limit))
        while core.unfinished:
            core.step()
        PLAIN[key] = core.collect(name).completions[0].ids
    return PLAIN[key]


class HybridTraffic(RuleBasedStateMachine):
    names = Bundle("names")
    offload = 0.0  # GiB

    def __init__(self) -> None:
        super().__init__()
        self.core = PAIR.engine(
            pages=20, max_requests=3, state_snapshots=3, max_batch_tokens=18,
            offload_host_gib=self.offload,
        )  # fmt: skip
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.texts: dict[bytes, list[int]] = {}
        self.checked: set[tuple[bytes, int]] = set()

    @rule(
        target=names,
        head=st.integers(0, 2),
        shared=st.integers(0, 14),
        tail=st.lists(st.integers(1, VOCAB - 2), min_size=1, max_size=12),
        limit=st.integers(1, 12),
        sampled=st.booleans(),
    )
    def add(self, head: int, shared: int, tail: list[int], limit: int, sampled: bool) -> str:
        prompt = [head + 1, 2, 3, 1] * 4
        prompt = [*prompt[:shared], *tail]
        params = SamplingParams(
            max_new_tokens=limit, temperature=1.0 if sampled else 0.0, seed=len(self.asked)
        )
        name = self.core.submit(prompt, params)
        self.asked[name] = prompt, params
        return name

    @rule(target=names, name=names)
    def ask_again(self, name: str) -> str:
        prompt, params = self.asked[name]
        other = self.core.submit(prompt, params)
        self.asked[other] = prompt, params
        return other

    @rule(name=consumes(names))
    def abort(self, name: str) -> None:
        if name in self.core._groups:
            self.core.forget(name)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            if not self.core.unfinished:
                return
            running = list(self.core.scheduler)
            self.core.step()
            for request in running:  # before their tables are gone, where they still are
                for index, key in enumerate(request.table.keys):
                    self.texts[key] = request.tokens(0, (index + 1) * self.core.pool.page_size)
            settled_states(self.core)
            self.check_kept()

    def check_kept(self) -> None:
        for key, slot in self.core.pool.snapshots._by_key.items():
            if key in self.texts and (key, slot) not in self.checked:
                check_state(self.core, self.texts[key], slot)
                self.checked.add((key, slot))
        kept = set(self.core.pool.snapshots._by_key.items())
        self.checked &= kept  # a slot that is used anew is looked at anew

    def teardown(self) -> None:
        while self.core.unfinished:
            self.step(1)
        for name in list(self.core._groups):
            prompt, params = self.asked[name]
            (done,) = self.core.collect(name).completions
            if params.temperature == 0:
                assert done.ids == plain_text(prompt, params.max_new_tokens)
        hybrid, pool = self.core.runner._hybrid, self.core.pool
        assert pool.available == pool.count
        assert not hybrid._slots
        assert sorted(hybrid._free) == [0, 1, 2]
        pool.snapshots.forget_all()
        pool.snapshots.reclaim()
        assert sorted(pool.snapshots._free) == [3, 4, 5]


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
TestHybridTraffic = HybridTraffic.TestCase
TestHybridTraffic.settings = settings(
    max_examples=6, stateful_step_count=20, deadline=None, suppress_health_check=CHECKS
)


class OffloadedTraffic(HybridTraffic):
    """The same with a host memory for a few dozen pages and states behind the cache."""

    offload = 300e3 / 2**30


TestOffloadedTraffic = OffloadedTraffic.TestCase
TestOffloadedTraffic.settings = TestHybridTraffic.settings


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("machine", [HybridTraffic, OffloadedTraffic])
def test_much_more_traffic(machine: type[HybridTraffic]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
        ),
    )
