"""The router: a request that a server loses is answered by another one, and nobody notices."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from dspark.server.route import create_router
from dspark.server.run import Listen, make_server
from server.process import Process
from server.relay import Relay
from server.serving import CHAT, MODEL, Served, body, chat


@contextlib.contextmanager
def routing(*urls: str, patience: float = 20.0) -> Iterator[str]:
    """Base url of a real router in a thread."""
    server = make_server(create_router(urls, patience), Listen(port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def client(base: str) -> OpenAI:
    return OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60)


def streamed(base: str, **fields: Any) -> tuple[list[str], list[str | None], int]:
    """Texts by index, their reasons to end, and the usage's completion tokens."""
    texts, ends, used = [""] * fields.get("n", 1), [None] * fields.get("n", 1), 0
    ids = set()
    for chunk in client(base).chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **fields
    ):
        ids.add(chunk.id)
        used = chunk.usage.completion_tokens if chunk.usage else used
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert ends[choice.index] is None
                ends[choice.index] = choice.finish_reason
    assert len(ids) == 1
    return texts, ends, used


CASES = [
    {"temperature": 0, "max_tokens": 60, "messages": chat()},
    {"temperature": 1, "seed": 5, "max_tokens": 50, "n": 2, "messages": chat("again")},
]


@pytest.mark.parametrize("case", CASES, ids=["greedy", "sampled"])
def test_a_stream_that_is_cut_anywhere_goes_on_elsewhere(served: Served, case) -> None:
    whole = served.client.chat.completions.create(model=MODEL, **case)
    for cut in (1, 300, 1500, 4000):
        relay = Relay(served.port, [cut, 2 * cut])
        with routing(relay.url, served.base) as base:
            texts, ends, used = streamed(base, **case)
            health = httpx2.get(f"{base}/health").json()
        relay.close()
        assert texts == [c.message.content for c in whole.choices], cut
        assert ends == [c.finish_reason for c in whole.choices]
        assert used == whole.usage.completion_tokens
        assert health["requests"] == 1
        assert health["resubmitted"] >= (cut > 1)
    served.idle()


def test_whole_answers_and_those_held_back_survive_too(served: Served) -> None:
    asked = body(temperature=0, max_tokens=40)
    probs = {**asked, "stream": True, "logprobs": True}
    with served.http() as http:
        want = http.post(CHAT, json=asked).json()
        wanted = http.post(CHAT, json=probs).text.count("logprobs")
    relay = Relay(served.port, [200, 200])
    with routing(relay.url, served.base) as base, httpx2.Client(base_url=base, timeout=60) as http:
        found = http.post(CHAT, json=asked).json()
        assert found["choices"] == want["choices"]
        assert found["usage"] == want["usage"]
        time.sleep(2.1)  # the relay rests
        held = http.post(CHAT, json=probs)
        assert held.text.endswith("data: [DONE]\n\n")
        assert held.text.count("logprobs") == wanted
        assert http.get("/health").json()["resubmitted"] == 2
    relay.close()


def test_a_request_lost_before_its_answer_began_counts_as_asked_again(served: Served) -> None:
    relay = Relay(served.port, [0])  # not even the head of the reply
    with routing(relay.url, served.base) as base, httpx2.Client(base_url=base, timeout=60) as http:
        assert http.post(CHAT, json=body(max_tokens=4)).status_code == 200
        assert http.get("/health").json()["resubmitted"] == 1
    relay.close()


def test_every_loss_of_one_request_counts_wherever_in_the_answer_it_was(served: Served) -> None:
    lossy = [Relay(served.port, [0]), Relay(served.port, [0]), Relay(served.port, [200])]
    with (
        routing(*(relay.url for relay in lossy), served.base) as base,
        httpx2.Client(base_url=base, timeout=60) as http,
    ):
        assert http.post(CHAT, json=body(max_tokens=4)).status_code == 200
        assert http.get("/health").json()["resubmitted"] == 3
    for relay in lossy:
        relay.close()


def test_refusals_and_facts_are_the_servers_own(served: Served) -> None:
    with routing(served.base) as base, httpx2.Client(base_url=base, timeout=60) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
        assert http.post(CHAT, content=b"{").status_code == 400
        for fields in ({"temperature": -1}, {"temperature": -1, "stream": True}):
            with served.http() as direct:
                want = direct.post(CHAT, json=body(**fields))
            found = http.post(CHAT, json=body(**fields))
            assert (found.status_code, found.json()) == (want.status_code, want.json())


def test_without_any_server_a_request_is_refused_in_time() -> None:
    relay = Relay(1, [])
    relay.close()
    with routing(relay.url, patience=0.3) as base:
        with pytest.raises(openai.APIStatusError) as refused:
            client(base).chat.completions.create(model=MODEL, messages=chat())
        assert refused.value.status_code == 502


@pytest.mark.slow
def test_a_decode_server_killed_while_it_answers_loses_no_request(
    made_pair: tuple[Path, Path],
) -> None:
    """Two real servers, one killed with SIGKILL in the middle of eight answers of both kinds."""
    target, draft = made_pair
    words = [
        str(draft),
        "--target",
        str(target),
        "--port",
        "0",
        "--no-probe",
        "--max-num-seqs",
        "8",
    ]
    servers = [Process(*words), Process(*words)]
    asked = [
        {"messages": chat(f"question {i}"), "temperature": i % 2, "seed": i, "max_tokens": 300}
        for i in range(8)
    ]
    extra = {"ignore_eos": True}
    want = [
        servers[1].client.chat.completions.create(model=str(target), extra_body=extra, **a)
        for a in asked
    ]
    found: list[str | None] = [None] * 8
    begun = threading.Event()

    def ask(number: int, base: str) -> None:
        own = OpenAI(base_url=f"{base}/v1", api_key="from-the-environment", max_retries=0)
        create = own.chat.completions.create
        fields = {"model": str(target), "extra_body": extra, **asked[number]}
        if number % 2:
            found[number] = create(**fields).choices[0].message.content
            return
        text = ""
        for chunk in create(stream=True, **fields):
            text += chunk.choices[0].delta.content or ""
            begun.set()
        found[number] = text

    with routing(*(server.base for server in servers)) as base:
        threads = [threading.Thread(target=ask, args=(i, base)) for i in range(8)]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        os.kill(servers[0].child.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        health = httpx2.get(f"{base}/health").json()
    servers[1].child.kill()
    assert health["resubmitted"] >= 1
    # Sampled texts of one seed are the same at one width; all of them are there and whole.
    assert [f for f in found if f is None] == []
    for number in range(0, 8, 2):
        assert found[number] == want[number].choices[0].message.content
