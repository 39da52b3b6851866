"""Ranks of torchrun: one is two, killed is not killed, and another number of them can go on.

Real processes under ``torch.distributed.run`` with gloo; each start costs seconds, so few tests.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import streaming_run
import torch
from streaming_run import Process
from test_streamed_training import assert_every_row_thrice, place
from tiny_models import one_thread  # noqa: F401 (autouse)

from dspark.errors import TrainingError
from dspark.training.parallel import GLOO_THREADS, Solo, require_even, wait_until_idle
from endpoints import free_endpoint


def assert_near(found: dict[str, Any], wanted: dict[str, Any], rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=rtol, atol=rtol)
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=5 * rtol, atol=rtol)
    assert abs(found["tau"] - wanted["tau"]) < 10 * rtol


def test_two_ranks_killed_and_resumed_are_one_process(tmp_path: Path) -> None:
    """Gradients are summed, the window's denominator is everybody's, and shards come back."""
    alone = streaming_run.train(place(tmp_path / "alone"), "", "offline", ema=0.9)
    folder = place(tmp_path / "two")
    arguments = ("train", str(folder), "", "offline", "ema=0.9")
    with Process(*arguments, "stop_at=5", ranks=2) as cut:
        cut.reaches(5)
    state = json.loads((folder / "resume" / "latest.json").read_text())
    assert (state["folder"], state["state"]["step"]) == ("step-0000004", 4)
    with Process(*arguments, ranks=2) as rest:
        assert_near(rest.result(folder), alone)


@pytest.mark.slow
def test_the_same_number_of_ranks_resumes_bit_for_bit_and_one_takes_over_from_two(
    tmp_path: Path,
) -> None:
    results = {}
    for name, stops, last in (("straight", [], 2), ("cut", [5, 11], 2), ("fewer", [7], 1)):
        folder = place(tmp_path / name)
        for stop in stops:
            with Process("train", str(folder), "", "offline", f"stop_at={stop}", ranks=2) as cut:
                cut.reaches(stop)
        with Process("train", str(folder), "", "offline", ranks=last) as rest:
            results[name] = rest.result(folder)
    assert results["cut"] == results["straight"]
    assert_near(results["fewer"], results["straight"])


@pytest.mark.slow
def test_two_ranks_take_a_live_stream_from_two_teachers(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    both = ",".join(
        [endpoint, endpoint[: endpoint.rindex(":") + 1] + str(int(endpoint.rsplit(":")[-1]) + 1)]
    )
    with Process("teach", endpoint, "one"):
        alone = streaming_run.train(place(tmp_path / "alone"), endpoint, "online")
    folder = place(tmp_path / "two")
    trainer = ("train", str(folder), endpoint, "online")
    with (
        Process("teach", both, "a"),
        Process("teach", both, "b"),
        Process(*trainer, ranks=2) as two,
    ):
        assert_near(two.result(folder), alone)
    assert_every_row_thrice((folder, 0), (folder, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"precision": '"bfloat16"'}, {"checkpoint_activations": "true"}, {"optimizer": '"muon"'}],
    ids=["bf16", "recomputed", "muon"],
)
def test_ways_of_computing_agree_between_one_and_two_ranks(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    results = []
    for ranks in (1, 2):
        folder = place(tmp_path / str(ranks))
        given = [f"{k}={v}" for k, v in changes.items()]
        with Process("train", str(folder), "", "offline", *given, ranks=ranks) as run:
            results.append(run.result(folder))
    assert_near(results[1], results[0], 2e-2 if "precision" in changes else 1e-4)


def test_activations_made_again_give_the_same_bits(tmp_path: Path) -> None:
    kept = streaming_run.train(place(tmp_path / "kept"), "", "offline", epochs=1.0)
    again = streaming_run.train(
        place(tmp_path / "again"), "", "offline", epochs=1.0, checkpoint_activations=True
    )
    assert again == kept


def test_a_window_that_ranks_cannot_share_is_refused() -> None:
    group = Solo()
    group.size = 3
    require_even(6, group)
    with pytest.raises(TrainingError) as caught:
        require_even(4, group)
    assert "Set it to 6" in caught.value.fix


def test_a_rank_ends_behind_the_last_work_of_its_threads() -> None:
    """A thread that drops a tensor while the interpreter goes away aborts the process."""
    begun, end = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_made")
        begun.set()
        for _ in range(60):
            time.sleep(0.002)
            done.append(sum(range(1000)))
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert not wait_until_idle(GLOO_THREADS, 0.02)
    assert wait_until_idle(GLOO_THREADS, 10.0)
    assert len(done) == 60
    end.set()
    thread.join()
    assert wait_until_idle("no such thread", 0.5)
