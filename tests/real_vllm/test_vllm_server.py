"""``dspark serve --engine vllm``: a real server with our draft, asked by our own commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trained_pair import TrainedPair, trained_pair
from vllm_environment import environment, vllm_python

from conftest import dspark
from dspark.bench.figures.comparison import Comparison
from dspark.bench.figures.schema import SuiteResults
from dspark.hidden.answers import read_answers

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

NAMES = ("tom", "mia", "ben")
START = 200  # seconds; half a minute on an idle machine


def variables() -> dict[str, str]:
    found = {**environment(plugin=True), "DSPARK_VLLM_PYTHON": str(vllm_python())}
    del found["VLLM_ENABLE_V1_MULTIPROCESSING"]  # as users run it: engine in a process of its own
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers_at(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    vllm_python()
    return trained_pair(Path(request.config.cache.mkdir("vllm")))


@contextmanager
def started(pair: TrainedPair, folder: Path, *words: str) -> Iterator[str]:
    """Url of a server that our own command has become."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "dspark", "serve", str(pair.draft), "--engine", "vllm", "--",
               "--port", str(port), "--host", "127.0.0.1", "--max-model-len", "256",
               "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
               "--served-model-name", "tiny", *words]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=variables(), start_new_session=True
        )
    try:
        deadline = time.monotonic() + START
        while not answers_at(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None, f"the server died:\n{log.read_text()[-6000:]}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(pair: TrainedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that tells acceptance by its counters only."""
    with started(pair, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def telling(pair: TrainedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that tells it with every answer."""
    words = ("--per-request-spec-decode-metrics", "detailed")
    with started(pair, tmp_path_factory.mktemp("telling"), *words) as url:
        yield url


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": "tiny", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def test_answers_of_vllm_become_rows_with_their_real_token_ids(
    server: str, pair: TrainedPair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(pair.run / "prompts", run / "prompts")
    endpoints = f'regenerate.endpoints=[{{"url": "{server}", "concurrency": 8}}]'
    # Sampled ones are sent with a seed of their own, and prompts come in chunks.
    warm = "regenerate.temperatures=[0, 1]"
    done = dspark("regenerate", str(pair.recipe), f"output={run}", endpoints, warm)
    assert done.returncode == 0, done.stderr
    theirs = {a.id: a for a in read_answers(run / "answers")}
    ours = {a.id: a for a in read_answers(pair.run / "answers")}
    assert set(theirs) == set(ours)
    cold = [a for a in theirs.values() if a.temperature == 0]
    assert 20 < len(cold) < len(theirs) - 20
    # Greedy: the embedded engine and vLLM wrote the same tokens, from the same prompt ids.
    same = [a.ids == ours[a.id].ids for a in cold if ours[a.id].temperature == 0]
    assert sum(same) >= 0.98 * len(same) > 10
    for answer in theirs.values():
        assert answer.ids[: answer.prompt_length] == ours[answer.id].ids[: answer.prompt_length]
        assert answer.generation is not None
        assert answer.generation.server == server


def question(number: int) -> str:
    return f"{NAMES[number % 3]} has {1 + number % 9} and gets {1 + number // 9 % 9}"


def test_conversations_are_written_turn_by_turn_as_our_own_engine_writes_them(
    server: str, pair: TrainedPair, tmp_path: Path
) -> None:
    """Later turns are asked behind the answers that vLLM itself gave."""
    file = tmp_path / "talks.jsonl"
    said = ("assistant", "nothing")
    talks = [[question(i), question(i + 31), question(i + 57)] for i in range(24)]
    lines = [
        # What was answered before is not read: the target answers every turn itself.
        {"messages": [{"role": r, "content": c} for t in turns for r, c in (("user", t), said)]}
        for turns in talks
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = (
        f"prompts.sources=[{{kind: file, path: {file}, category: sums, train: 20, held_out: 4}}]"
    )
    rows = []
    for name, more in (
        ("own", []),
        ("vllm", [f'regenerate.endpoints=[{{"url": "{server}", "concurrency": 4}}]']),
    ):
        for verb, words in (("prompts", []), ("regenerate", more)):
            done = dspark(
                verb, str(pair.recipe), f"output={tmp_path / name}", source,
                "regenerate.max_new_tokens=48", "regenerate.temperatures=[0]", *words,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        rows.append({a.id: a for a in read_answers(tmp_path / name / "answers")})
    ours, theirs = rows
    assert set(ours) == set(theirs)
    assert len(ours) >= 16
    # All three answers of a conversation are trained on: three runs of the mask.
    edges = [sum(b > a for a, b in pairwise(x.loss_mask)) for x in theirs.values()]
    assert max(edges) == 3
    same = [theirs[name].ids == ours[name].ids for name in ours]
    assert sum(same) >= 0.95 * len(same)


def data_of(folder: Path) -> Path:
    """Rows under the names of two benchmarks: one turn each, and two."""
    folder.mkdir(exist_ok=True)
    single = [{"turns": [question(i)], "n": i} for i in range(257)]
    double = [
        {"question_id": i, "category": "sums", "turns": [question(i), question(i + 5)]}
        for i in range(80)
    ]
    for name, rows in (("mbpp", single), ("mt-bench", double)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def bench(out: Path, *what: str) -> SuiteResults:
    data = data_of(out.parent / "data")
    done = dspark(
        "bench", *what, "--task", "mbpp", "--data", str(data), "--out", str(out), "prompts=24",
        "max_tokens=64", "warm_up=0", "temperatures=[0]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return SuiteResults.model_validate_json(out.read_text())


def test_acceptance_from_its_metrics_lies_in_the_interval_of_our_engine(
    server: str, pair: TrainedPair, tmp_path: Path
) -> None:
    theirs = bench(tmp_path / "vllm.json", "--base-url", server)
    ours = bench(tmp_path / "own.json", str(pair.draft))
    (a,), (b,) = theirs.arms, ours.arms
    assert a.source != b.source
    assert a.acceptance is not None
    assert b.acceptance is not None
    assert b.acceptance.interval is not None
    assert a.acceptance.length is not None
    low, high = b.acceptance.interval
    # Behind the end of an answer vLLM counts what our engine leaves out: the last step's room.
    assert low > 4
    assert low <= a.acceptance.length <= high + 0.5
    texts = [[p.digests for p in arm.prompts] for arm in (a, b)]
    assert texts[0] == texts[1]


def test_both_turns_of_two_servers_are_compared_prompt_by_prompt(
    server: str, telling: str, tmp_path: Path
) -> None:
    """The same draft twice, told of in two ways: by counters around an answer, and by the answer."""
    done = dspark(
        "compare", server, telling, "--task", "mt_bench", "--data", str(data_of(tmp_path / "data")),
        "--out", str(tmp_path / "out"), "prompts=12", "max_tokens=64", "warm_up=0",
        "temperatures=[0]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Comparison.model_validate_json((tmp_path / "out" / "comparison.json").read_text())
    (pair,) = found.pairs
    assert (pair.prompts, pair.unpaired) == (12, 0)
    (identity,) = pair.identity
    assert (identity.same, identity.of) == (24, 24)
    assert pair.a is not None
    assert pair.a > 3
    assert pair.a == pytest.approx(pair.b, rel=1e-9)
    results = [
        SuiteResults.model_validate_json(path.read_text())
        for path in sorted((tmp_path / "out").glob("[AB]-*.json"))
    ]
    arms = [arm for r in results for arm in r.arms]
    assert [arm.source for arm in arms] == ["vllm-counters", "vllm-request"]
    for arm in arms:
        assert (arm.turns, arm.failed) == (24, 0)
        assert set(arm.by_turn) == {"turn 1", "turn 2"}
        assert arm.acceptance is not None
        assert arm.acceptance.interval is not None


def test_counters_that_moved_for_somebody_else_are_not_believed(
    server: str, tmp_path: Path
) -> None:
    over = threading.Event()

    def stranger() -> None:
        while not over.is_set():
            ask(server, {"prompt": [1, 5, *range(10, 20)], "max_tokens": 48, "temperature": 0})

    other = threading.Thread(target=stranger)
    other.start()
    try:
        (arm,) = bench(tmp_path / "busy.json", "--base-url", server, "concurrency=2").arms
    finally:
        over.set()
        other.join()
    assert arm.failed == 0
    assert arm.acceptance is None
    assert any("were ours" in notice for notice in arm.notices), arm.notices
    (alone,) = bench(tmp_path / "alone.json", "--base-url", server, "concurrency=2").arms
    assert alone.acceptance is not None
    assert alone.acceptance.length is not None
    assert alone.acceptance.length > 4


def test_what_the_cpu_runner_cannot_do_is_refused_and_never_ignored(pair: TrainedPair) -> None:
    for words, said in (
        (["--speculative-config", '{"rejection_sample_method": "block"}'], "standard"),
        (["--num-speculative-tokens", "9"], "7"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dspark", "serve", str(pair.draft), "--engine", "vllm", "--",
             *words],
            capture_output=True, text=True, timeout=120, env=variables(), check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


def test_a_seed_with_a_prompt_in_chunks_does_not_end_the_server(server: str) -> None:
    """It ends vLLM's own CPU runner. The text is not the same twice: sampled drafts take no seed."""
    body = {"prompt": [1, 5, *range(10, 40)] * 5, "max_tokens": 24, "temperature": 1, "seed": 11}
    assert len(body["prompt"]) > 128
    for _ in range(2):
        assert ask(server, body)["choices"][0]["text"]
    assert answers_at(f"{server}/health")
