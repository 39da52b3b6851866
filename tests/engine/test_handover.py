"""Prefill in one process, decoding in another: the same text and acceptance, whoever dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import environment
from dspark.decoding.params import SamplingParams
from dspark.engine.handover import DecodeNode, PageLink
from dspark.errors import DecodingError
from dspark.hidden.transport import open_transport
from engine.hybrid_pairs import SIZE, VOCAB, HybridPair

GREEDY = SamplingParams(max_new_tokens=16)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(30, 60))] for _ in range(count)]


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def prefill_process(kind: str, transport: str = "tcp", slow: float = 0.0):
    """(process, endpoint) of a running prefill node."""
    endpoint = free_endpoint()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "prefill_process.py"), kind, endpoint, transport],
        stdout=subprocess.PIPE, text=True, env={**environment(), "DSPARK_TEST_SLOW": str(slow)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process, endpoint
    finally:
        process.kill()
        process.wait()


# A process takes seconds to start: the hybrid pair, which moves rows and states, stands for both.
@pytest.fixture(scope="module", params=[pytest.param("latent", marks=pytest.mark.slow), "hybrid"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(kind: str) -> HybridPair:
    return HybridPair.latent() if kind == "latent" else HybridPair.of()


@pytest.fixture(scope="module")
def running(kind: str):
    with prefill_process(kind) as (process, endpoint):
        yield process, endpoint


@contextlib.contextmanager
def decode_node(pair: HybridPair, endpoint: str, patience: float = 60.0, transport: str = "tcp"):
    link = PageLink(endpoint, open_transport(transport, "handover"))
    core = pair.engine(offload_host_gib=0.1, state_snapshots=8)
    try:
        yield DecodeNode(core, link, patience)
    finally:
        link.close()


def finish(node, texts, params=GREEDY):
    names = [node.submit(text, params) for text in texts]
    while node.unfinished:
        node.step()
    return [node.collect(name) for name in names]


def colocated(pair: HybridPair, texts):
    return finish(pair.engine(prefix_cache=False), texts)


def same(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.completions[0].ids == other.completions[0].ids
        assert one.acceptance == other.acceptance


def test_text_and_acceptance_are_those_of_one_machine(pair, running) -> None:
    texts = prompts(5)
    with decode_node(pair, running[1]) as node:
        found = finish(node, texts)
        assert (node.counts.in_time, node.counts.late) == (5, 0)
        assert all(out.cached_tokens >= len(text) - 2 * SIZE
                   for out, text in zip(found, texts, strict=True))  # fmt: skip
        assert node.offload.counts.refused == 0
        assert node.counts.pages >= sum(len(t) // SIZE - 1 for t in texts)
    same(found, colocated(pair, texts))


def test_the_first_block_already_drafts_from_transferred_rows(pair, running) -> None:
    """What the first drafted step accepts, request by request, is what one machine accepts."""
    accepted = []
    for split in (True, False):
        first = []
        for text in prompts(6, seed=8):
            with contextlib.ExitStack() as stack:
                node = pair.engine(prefix_cache=False)
                if split:
                    node = stack.enter_context(decode_node(pair, running[1]))
                node.submit(text, GREEDY)
                seen = []
                while node.unfinished:
                    seen += [len(delta.ids) for delta in node.step()]
                first.append(seen[:3])
        accepted.append(first)
    assert accepted[0] == accepted[1]
    assert any(step > 1 for steps in accepted[0] for step in steps), "nothing was accepted"


@pytest.mark.slow
def test_shared_memory_carries_the_same_pages(pair, kind) -> None:
    texts = prompts(2, seed=5)
    with (
        prefill_process(kind, "shm") as (_, endpoint),
        decode_node(pair, endpoint, transport="shm") as node,
    ):
        found = finish(node, texts)
        assert node.counts.in_time == 2
        assert node.offload.counts.from_host > 10
    same(found, colocated(pair, texts))


def test_a_prefill_node_killed_while_it_sends_loses_no_request(pair, kind) -> None:
    texts = prompts(4, seed=6)
    with (
        prefill_process(kind, slow=0.05) as (process, endpoint),
        decode_node(pair, endpoint, patience=1.5) as node,
    ):
        names = [node.submit(text, GREEDY) for text in texts]
        while node.counts.pages < 3:
            node.step()
        os.kill(process.pid, signal.SIGKILL)
        while node.unfinished:
            node.step()
        found = [node.collect(name) for name in names]
        assert node.counts.late >= 3
    same(found, colocated(pair, texts))


def test_a_decode_node_that_dies_leaves_the_prefill_node_to_others(pair, running) -> None:
    process, endpoint = running
    link = PageLink(endpoint, open_transport("tcp", "handover"))
    for number, text in enumerate(prompts(3, seed=7)):
        link.ask(f"lost-{number}", text)
    time.sleep(0.05)
    link.close()
    texts = prompts(3, seed=7)
    with decode_node(pair, endpoint) as node:
        found = finish(node, texts)
        assert node.counts.in_time == 3
    assert process.poll() is None
    same(found, colocated(pair, texts))


def test_lost_damaged_and_foreign_pages_are_computed(pair, running) -> None:
    texts = prompts(3, seed=9)
    with decode_node(pair, running[1]) as node:
        arrived = node.link.arrived

        def spoiled():
            for number, (name, data) in enumerate(arrived()):
                if number % 3 == 0:
                    continue  # lost
                yield name, data if number % 3 == 1 else data[:-4] + b"\1\2\3\4"

        node.link.arrived = spoiled
        found = finish(node, texts)
    same(found, colocated(pair, texts))


@pytest.mark.slow
def test_pages_of_other_weights_are_never_used() -> None:
    pair = HybridPair.of()
    texts = prompts(2, seed=10)
    with (
        prefill_process("stranger") as (_, endpoint),
        decode_node(pair, endpoint) as node,
    ):
        found = finish(node, texts)
        assert node.counts.pages > 10
        assert all(out.cached_tokens == 0 for out in found)
    same(found, colocated(pair, texts))


def test_without_a_prefill_node_everything_is_computed_here(pair) -> None:
    texts = prompts(2, seed=11)
    with decode_node(pair, free_endpoint(), patience=0.2) as node:
        found = finish(node, texts)
        assert node.counts.late == 2
    same(found, colocated(pair, texts))


def test_an_engine_without_room_for_pages_is_refused(pair) -> None:
    with pytest.raises(DecodingError, match="offload_host_gib"):
        DecodeNode(pair.engine(), None)  # type: ignore[arg-type]
