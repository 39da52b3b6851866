"""A suite over HTTP against real servers with every way of telling acceptance, and every fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.scripted_server import Reply, Scripted, Seen, scripted
from dspark.artifacts.progress import OnDone, untold
from dspark.bench.figures.arm import arm_figures
from dspark.bench.figures.schema import ArmFigures
from dspark.bench.play.http import HttpPlayer, accepted_of
from dspark.bench.play.log import AnswerLog, read_answers
from dspark.bench.play.play import play_arm, warm_up
from dspark.bench.play.settings import SuiteSettings
from dspark.bench.tasks.questions import Question
from dspark.bench.tasks.task import Task, task_named
from dspark.client import Client, Endpoint, Retry, Timeouts
from dspark.errors import EndpointError, ForeignArtifactError
from told import Told

TASK = task_named("mt_bench")
QUESTIONS = [Question("mt_bench", f"mt_bench/{i}", "c", (f"q {i}", "again")) for i in range(3)]
VLLM = {
    "speculative_decoding": {
        "mean_acceptance_length": 1.5,
        "acceptance_histogram": [2, 0, 2, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
        "per_step_accepted": [0, 2, 2, 0],
    }
}
OURS = {
    "acceptance": {
        "steps": 2, "drafted": 6, "admitted": 5, "accepted": 3, "acceptance_length": 2.5,
        "admitted_per_position": [2, 2, 1], "accepted_per_position": [2, 1, 0],
    }
}  # fmt: skip


def stream(
    text: str = "hello", ids: list[int] | None = None, finish: str | None = "stop", **extra: Any
) -> Reply:
    """A chat stream of two pieces, an end and a usage."""
    half = {"index": 0, "delta": {"content": text}, "token_ids": ids}
    end = {"index": 0, "delta": {}, "finish_reason": finish}
    usage = {"prompt_tokens": 20, "completion_tokens": 9}
    pieces: list[Any] = [
        {"model": "m", "choices": [half]},
        {"model": "m", "choices": [end]},
        {"model": "m", "choices": [], "usage": usage, **extra},
    ]
    return Reply(pieces=pieces)


def server(chat: Callable[[Seen], Reply], metrics: Callable[[], str] | None = None) -> Any:
    def script(seen: Seen) -> Reply:
        if seen.path.endswith("/models"):
            return Reply({"data": [{"id": "m"}]})
        if seen.path == "/metrics" and metrics is not None:
            return Reply(metrics())
        if seen.path.endswith("/chat/completions"):
            return chat(seen)
        return Reply({"error": "no such place"}, status=404)

    return scripted(script)


async def played(
    running: Scripted,
    settings: SuiteSettings,
    log: AnswerLog,
    task: Task = TASK,
    on_question: OnDone = untold,
) -> ArmFigures:
    endpoint = Endpoint(running.url, concurrency=settings.concurrency)
    retry = Retry(attempts=2, first=0.01, most=0.02)
    async with Client([endpoint], retry=retry, timeouts=Timeouts(read=5)) as client:
        await client.connect()
        player = HttpPlayer(client, endpoint, one_by_one=settings.concurrency == 1)
        await player.counters()
        await warm_up(player, task, QUESTIONS, settings)
        arm = await play_arm(player, task, QUESTIONS, 0.0, settings, log, on_question)
        return arm_figures(arm, settings, "a test", 80)


def measure(
    running: Scripted, log: AnswerLog | None = None, told: OnDone = untold, **settings: Any
) -> ArmFigures:
    own = SuiteSettings(**({"timeout": 5.0} | settings))
    return asyncio.run(played(running, own, log or AnswerLog(None, {}), on_question=told))


@pytest.mark.parametrize(
    ("extra", "source", "length"),
    [({"metrics": VLLM}, "vllm-request", 2.0), ({"dspark": OURS}, "dspark", 2.5)],
)
def test_acceptance_of_every_request_where_the_server_tells(
    extra: dict[str, Any], source: str, length: float
) -> None:
    with server(lambda _: stream(ids=[1, 2], **extra)) as running:
        found = measure(running, concurrency=3)
    assert found.source == source
    assert found.acceptance is not None
    assert found.acceptance.length == length
    assert found.acceptance.interval is not None
    assert (found.turns, found.failed, found.tokens) == (6, 0, 54)


def test_vllms_histogram_gives_slots_and_its_steps_positions() -> None:
    accepted, _ = accepted_of({"metrics": VLLM})
    assert accepted is not None
    assert accepted.accepted_at == (2, 2, 0)
    assert accepted.per_step == (0, 2, 2, 0)
    sparse = {"speculative_decoding": VLLM["speculative_decoding"]
              | {"acceptance_histogram": {"0": 2, "2": 2}}}  # fmt: skip
    again, _ = accepted_of({"metrics": sparse})
    assert again == accepted


@pytest.mark.parametrize("extra", [{}, {"metrics": {"speculative_decoding": {"new": 1}}},
                                   {"dspark": {"acceptance": None}}, {"metrics": 3}])  # fmt: skip
def test_fields_of_an_unknown_shape_count_as_absent(extra: dict[str, Any]) -> None:
    assert accepted_of(extra) == (None, "none")


class Counting:
    """A server that only has counters: 4 steps, 5 accepted of 12, 10 tokens an answer."""

    def __init__(self, foreign: int = 0) -> None:
        self.answers, self.foreign = 0, foreign

    def chat(self, _: Seen) -> Reply:
        self.answers += 1
        return stream()

    def metrics(self) -> str:
        n = self.answers
        return (
            f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {4 * n}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {12 * n}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {5 * n}\n'
            f'vllm:request_success_total{{model_name="m"}} {n * (1 + self.foreign)}\n'
            f'vllm:generation_tokens_total{{model_name="m"}} {9 * n}\n'
            f'vllm:num_requests_running{{model_name="m"}} 0\n'
        )


def test_counters_around_single_requests_give_acceptance_by_prompt() -> None:
    counting = Counting()
    with server(counting.chat, counting.metrics) as running:
        found = measure(running, concurrency=1)
    assert found.source == "vllm-counters"
    assert found.acceptance is not None
    assert found.acceptance.length == 2.25
    assert found.acceptance.interval == (2.25, 2.25)


def test_counters_around_concurrent_requests_give_a_total() -> None:
    counting = Counting()
    with server(counting.chat, counting.metrics) as running:
        found = measure(running, concurrency=3)
    assert found.acceptance is not None
    assert (found.acceptance.length, found.acceptance.interval) == (2.25, None)


def test_counters_of_a_busy_server_give_nothing_and_say_why() -> None:
    counting = Counting(foreign=1)
    with server(counting.chat, counting.metrics) as running:
        found = measure(running, concurrency=3)
    assert found.acceptance is None
    assert any("12 requests, 6 were ours" in text for text in found.notices)


def test_a_server_without_metrics_is_measured_and_said_to_tell_nothing() -> None:
    with server(lambda _: stream()) as running:
        found = measure(running)
    assert found.source == "none"
    assert found.speed is not None
    assert any("tells nothing about drafting" in text for text in found.notices)


def test_the_second_turn_is_asked_with_the_servers_own_first_answer() -> None:
    with server(lambda _: stream("mine")) as running:
        measure(running, warm_up=0)
        bodies = [seen.body for seen in running.asked("/v1/chat/completions")]
    second = [b for b in bodies if len(b["messages"]) == 3]
    assert len(second) == 3
    assert second[0]["messages"][1] == {"role": "assistant", "content": "mine"}
    assert bodies[0]["return_acceptance"] is True
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert len({b["seed"] for b in bodies}) == 6


def test_a_server_without_a_switch_for_thinking_is_asked_again_and_it_is_said() -> None:
    def chat(seen: Seen) -> Reply:
        if "chat_template_kwargs" in seen.body:
            return Reply({"error": "unrecognized: chat_template_kwargs"}, status=400)
        return stream(dspark=OURS) if seen.body.get("return_acceptance") else stream()

    async def asked(url: str) -> tuple[Any, list[str]]:
        endpoint = Endpoint(url)
        async with Client([endpoint]) as client:
            await client.connect()
            player = HttpPlayer(client, endpoint, one_by_one=True)
            answer = await warm_up(player, TASK, QUESTIONS, SuiteSettings())
            return answer, player.notices

    with server(chat) as running:
        answer, told = asyncio.run(asked(running.url))
    assert answer.source == "dspark", "the other wishes were kept"
    assert told == ["The server takes no switch for thinking: its template's default was used."]


def test_a_strict_server_is_asked_again_without_fields_it_does_not_know() -> None:
    def chat(seen: Seen) -> Reply:
        if "return_acceptance" in seen.body:
            return Reply({"error": "unknown field"}, status=400)
        return stream()

    with server(chat) as running:
        found = measure(running)
        asked = running.asked("/v1/chat/completions")
    assert found.failed == 0
    assert sum("return_acceptance" in seen.body for seen in asked) == 1


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply({"error": "too long"}, status=400), "HTTP 400"),
        (Reply(pieces=[{"model": "m", "choices": "nonsense"}]), "endpoint"),
        (Reply(pieces=[{"model": "m", "choices": []}], done=False), "without [DONE]"),
        (Reply(pieces=[{"model": "m", "choices": []}]), "endpoint"),
        (stream(finish=None), "endpoint"),
    ],
)
def test_a_refused_or_malformed_answer_fails_alone(reply: Reply, why: str) -> None:
    def chat(seen: Seen) -> Reply:
        return reply if seen.body["messages"][0]["content"] == "q 1" else stream()

    with server(chat) as running:
        found = measure(running)
    assert (found.turns, found.failed) == (5, 1), "its second turn was not asked"
    assert any(why in text for text in found.notices)


def test_a_slow_answer_is_a_timeout_and_is_counted() -> None:
    def chat(seen: Seen) -> Reply:
        made = stream()
        made.seconds = 3.0 if seen.body["messages"][0]["content"] == "q 2" else 0.0
        return made

    with server(chat) as running:
        found = measure(running, timeout=1.5)
    assert (found.failed, found.timed_out) == (1, 1)


def test_a_server_that_dies_stops_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path, answered = tmp_path / "x.answers.jsonl", 0

    def dying(seen: Seen) -> Reply:
        nonlocal answered
        answered += 1
        return Reply(cut=True) if answered > 4 else stream(dspark=OURS)

    with server(dying) as running, pytest.raises(EndpointError) as stopped:
        measure(running, AnswerLog(path, {"run": 1}), warm_up=0)
    assert "same command" in stopped.value.fix
    kept = [t for t in read_answers(path)[1] if t.answer is not None]
    assert len(kept) == 4
    log = AnswerLog(path, {"run": 1})
    assert log.resumed == 4
    whole = sum(all(log.get(q.id, 0.0, n) for n in range(len(q.turns))) for q in QUESTIONS)
    with server(lambda _: stream(dspark=OURS)) as running:
        told = Told()
        found = measure(running, log, told, warm_up=0)
        assert len(running.asked("/v1/chat/completions")) == 2
    assert whole
    assert (told.kept, told.made) == (whole, len(QUESTIONS) - whole)
    assert (found.turns, found.failed) == (6, 0)
    assert found.acceptance is not None
    assert found.speed is None
    assert any("4 turns are of an earlier process" in text for text in found.notices)


def test_answers_of_another_run_are_not_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "x.answers.jsonl"
    AnswerLog(path, {"stack": "a", "draft": 1})
    with pytest.raises(ForeignArtifactError, match="another draft"):
        AnswerLog(path, {"stack": "a", "draft": 2})


def test_a_torn_last_line_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "x.answers.jsonl"
    with server(lambda _: stream()) as running:
        measure(running, AnswerLog(path, {}))
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-40], encoding="utf-8")
    assert AnswerLog(path, {}).resumed == 5
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:])
