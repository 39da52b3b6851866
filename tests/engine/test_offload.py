"""Pages that left the cache come back whole or not at all, and drafts never notice."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.engine import EngineOptions
from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Completion
from dspark.engine.core import EngineCore
from dspark.engine.offload import PageStore
from dspark.errors import StorageError
from engine.hybrid_pairs import VOCAB, HybridPair, settled_states

PAGES = 22  # room for one long text and a half
HOST = 1.0


@pytest.fixture(scope="module", params=["latent", "hybrid"])
def pair(request: pytest.FixtureRequest) -> HybridPair:
    return HybridPair.latent() if request.param == "latent" else HybridPair.of()


def texts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB - 1) for _ in range(50)] for _ in range(count)]


def ask(core: EngineCore, text: list[int], **fields) -> tuple[int, Completion]:
    name = core.submit(text, SamplingParams(**{"max_new_tokens": 16, **fields}))
    while core.unfinished:
        core.step()
        if core.runner._hybrid is not None and not core.options.offload_fp8:
            settled_states(core)  # rows that came back rounded change what follows
    out = core.collect(name)
    assert core.pool.available == core.pool.count
    return out.cached_tokens, out.completions[0]


def rounds(core: EngineCore, times: int = 2) -> list[tuple[int, Completion]]:
    """Five texts that do not fit together, one after the other, and again."""
    return [ask(core, text) for _ in range(times) for text in texts(5)]


def same(found: list[tuple[int, Completion]], cold: list[tuple[int, Completion]]) -> None:
    for (_, one), (_, other) in zip(found, cold, strict=True):
        assert one.ids == other.ids
        assert one.acceptance == other.acceptance


@pytest.fixture(scope="module")
def cold(pair: HybridPair) -> list[tuple[int, Completion]]:
    return rounds(pair.engine(prefix_cache=False, pages=PAGES))


def test_without_offload_evicted_texts_are_cold(pair: HybridPair, cold) -> None:
    found = rounds(pair.engine(pages=PAGES, state_snapshots=2))
    assert sum(cached for cached, _ in found) < 5 * 48
    same(found, cold)


def test_evicted_pages_are_hit_in_host_memory_and_accept_as_a_cold_start(pair, cold) -> None:
    core = pair.engine(pages=PAGES, state_snapshots=2, offload_host_gib=HOST)
    found = rounds(core)
    counts = core.offload.counts
    assert counts.saved > 40
    assert counts.from_host > 30
    assert counts.hit_rate > 0
    assert counts.from_disk == counts.refused == 0
    assert [cached for cached, _ in found[5:]] == [48] * 5
    same(found, cold)
    assert sum(c.acceptance.accepted for _, c in found) > 20


def test_what_leaves_host_memory_is_hit_on_disk_even_by_the_next_engine(
    pair, cold, tmp_path: Path
) -> None:
    fields = {"pages": PAGES, "state_snapshots": 2, "offload_disk_gib": 1.0,
              "offload_path": str(tmp_path)}  # fmt: skip
    core = pair.engine(**fields)
    same(rounds(core), cold)
    assert core.offload.counts.from_disk > 30
    again = pair.engine(**fields)
    found = rounds(again, 1)
    assert sum(cached > 0 for cached, _ in found) >= 4
    same(found, cold[:5])
    stale = pair.engine(**fields, identity="other weights")
    found = rounds(stale, 1)
    assert all(cached == 0 for cached, _ in found)  # keys begin with the identity
    assert stale.offload.counts.from_disk == 0
    same(found, cold[:5])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 4]) + data[-19:]


def foreign(data: bytes) -> bytes:
    return b"SOMEELSE" + data[8:]


def newer(data: bytes) -> bytes:
    return data[:8] + b"\x07\0" + data[10:]


SLOWER = [pytest.param(f, marks=pytest.mark.slow) for f in (cut, foreign, newer, lambda _: b"")]


@pytest.mark.parametrize("change", [flipped, *SLOWER])
def test_pages_that_are_not_sound_are_refused_and_computed(
    pair, cold, tmp_path: Path, change
) -> None:
    fields = {"pages": PAGES, "state_snapshots": 2, "offload_disk_gib": 1.0,
              "offload_path": str(tmp_path)}  # fmt: skip
    rounds(pair.engine(**fields), 1)
    files = sorted(tmp_path.glob("*.dspage"))
    for path in files:
        path.write_bytes(change(path.read_bytes()))
    core = pair.engine(**fields)
    text = texts(1)[0]
    cached, found = ask(core, text)
    assert cached == 0
    assert core.offload.counts.refused >= 1
    same([(0, found)], cold[:1])
    assert len(list(tmp_path.glob("*.dspage"))) < len(files)


@pytest.mark.slow
def test_a_page_under_another_texts_name_is_refused(pair, cold, tmp_path: Path) -> None:
    fields = {"pages": PAGES, "state_snapshots": 2, "offload_disk_gib": 1.0,
              "offload_path": str(tmp_path)}  # fmt: skip
    rounds(pair.engine(**fields), 1)
    files = sorted(tmp_path.glob("*-page.dspage"))
    contents = [path.read_bytes() for path in files]
    for path, data in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    core = pair.engine(**fields)
    cached, found = ask(core, texts(1)[0])
    assert (cached, core.offload.counts.from_disk) == (0, 0)
    same([(0, found)], cold[:1])


@pytest.mark.slow
def test_files_that_vanish_are_misses(pair, cold, tmp_path: Path) -> None:
    fields = {"pages": PAGES, "state_snapshots": 2, "offload_disk_gib": 1.0,
              "offload_path": str(tmp_path)}  # fmt: skip
    rounds(pair.engine(**fields), 1)
    core = pair.engine(**fields)
    for path in tmp_path.glob("*.dspage"):
        path.unlink()
    same(rounds(core), cold)


@pytest.mark.slow
def test_fp8_pages_are_smaller_and_still_hit(pair) -> None:
    core = pair.engine(pages=PAGES, state_snapshots=2, offload_host_gib=HOST, offload_fp8=True)
    whole = pair.engine(pages=PAGES, state_snapshots=2, offload_host_gib=HOST)
    found = rounds(core)
    assert sum(cached for cached, _ in found) > 200
    assert core.offload.layout.byte_count < 0.7 * whole.offload.layout.byte_count


def test_forgotten_weights_leave_nothing_outside(pair) -> None:
    core = pair.engine(pages=PAGES, state_snapshots=2, offload_host_gib=HOST)
    rounds(core, 1)
    core.pool.forget_all()
    assert core.offload.store.in_host == 0
    assert ask(core, texts(1)[0])[0] == 0


def test_many_at_once_under_pressure_are_as_if_alone(pair) -> None:
    prompts = [t[: random.Random(i).randint(5, 50)] for i in range(3) for t in texts(5, seed=2)]
    params = SamplingParams(max_new_tokens=12)
    answers = []
    for fields in ({"prefix_cache": False}, {"offload_host_gib": HOST, "state_snapshots": 3}):
        core = pair.engine(pages=30, max_requests=3, max_batch_tokens=20, **fields)
        names = [core.submit(p, params) for p in prompts]
        while core.unfinished:
            core.step()
        answers.append([core.collect(name).completions[0].ids for name in names])
    assert answers[0] == answers[1]
    assert core.offload.counts.from_host > 0


@settings(deadline=None, max_examples=60)
@given(
    host=st.integers(0, 50),
    disk=st.integers(0, 80),
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=40),
)
def test_a_store_keeps_its_bounds_and_gives_back_what_it_keeps(
    tmp_path_factory, host: int, disk: int, sizes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store, kept = PageStore(host, folder, disk), {}
    for number, size in sizes:
        name = f"{number:x}-page"
        store.put(name, kept.setdefault(name, os.urandom(size)))
        assert store.in_host == sum(map(len, store._host.values())) <= host
        files = {p.stem: p.stat().st_size for p in folder.glob("*.dspage")}
        assert files == dict(store._disk)
        assert store.on_disk == sum(files.values()) <= disk
        assert not set(store._host) & set(store._disk)
        for other, data in kept.items():
            found = store.get(other)
            assert found is None or found[0] == data
    again = PageStore(host, folder, disk)
    assert again.on_disk == store.on_disk


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="offload_path"):
        PageStore(0, tmp_path / "file" / "below", 10)
    with pytest.raises(ValueError, match="go together"):
        EngineOptions(offload_disk_gib=1.0)
