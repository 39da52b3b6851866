"""What clients and accidents do to a server: it refuses clearly, frees what was held, and lives."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from server.serving import (
    CHAT,
    MODEL,
    Served,
    body,
    fault,
    make_engine,
    raw_request,
    serving,
)

# --- what is asked wrongly --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"max_tokens": 10**9}, 400, "max_tokens", "room for"),
        ({"max_completion_tokens": 600}, 400, "max_tokens", "room for"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, 400, "max_tokens", "integer"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-9}, 400, "temperature", "1e-05"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"n": 129}, 400, "n", "128"),
        ({"n": 100}, 400, "n", "72 at most"),
        ({"stop": ""}, 400, "stop", "at least 1 character"),
        ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "not a token id"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "vocabulary"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "system"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0", "content is required"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, 400, "messages", "cannot fit"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt", "512 tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         400, "messages", "text"),
        ({"top_logprobs": 3}, 400, None, "logprobs is true"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream is true"),
        ({"temprature": 1}, 400, "temprature", "Unrecognized request argument"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_new_tokens", "at most"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         400, "grammar", "compiles"),
        ({"structured_outputs": {"regex": "((("}}, 400, "grammar", "compiles"),
        ({"tool_choice": "required"}, 400, None, "needs tools"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, 400,
         "tools.0.function.name", "pattern"),
        ({"seed": 2**63}, 400, "seed", "less than"),
    ],
)  # fmt: skip
def test_impossible_requests_say_what_to_change(
    served: Served, fields: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    with served.http() as http:
        error = fault(http.post(CHAT, json=body(**fields)), status)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_client_library_raises_its_own_errors(served: Served) -> None:
    client = served.client
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=body()["messages"])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="room for"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**6, stream=True)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model=MODEL, prompt=[1, 10**6])
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 512
    served.idle()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "JSON body is required"),
        (b"{", "not valid JSON"),
        (b'{"model": "\xff\xfe"}', "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', "not valid JSON"),
        (b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}', "temperature"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "not valid JSON"),
        (b'{"seed": ' + b"9" * 10_000 + b', "messages": [{"role": "user", "content": "x"}]}', ""),
        (b'["not", "an", "object"]', "dictionary"),
    ],
    ids=["empty", "cut", "bytes", "surrogate", "nan", "huge", "deep", "deeper", "long", "list"],
)  # fmt: skip
def test_bodies_that_are_no_requests_are_400(served: Served, content: bytes, says: str) -> None:
    with served.http() as http:
        headers = {"content-type": "application/json"}
        error = fault(http.post(CHAT, content=content, headers=headers), 400)
    assert says in error["message"]


def test_deep_but_valid_schemas_neither_crash_nor_hang(served: Served) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    asked = body(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        max_tokens=5,
    )
    with served.http() as http:
        assert http.post(CHAT, json=asked).status_code in (200, 400)
        assert http.get("/health").status_code == 200


def test_other_content_types_methods_and_paths_are_refused_in_shape(served: Served) -> None:
    with served.http() as http:
        fault(http.post(CHAT, content=b"x=1", headers={"content-type": "text/plain"}), 400)
        fault(http.get(CHAT), 405)
        fault(http.get("/v1/nowhere"), 404)
        fault(http.get("/v1/models/other/../../x"), 404)
        assert http.get("/docs").status_code == 404


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd",
                                  "/v1/models/..%2f..%2f..%2fetc%2fpasswd", "//etc/passwd"])  # fmt: skip
def test_no_path_leads_to_a_file(served: Served, path: str) -> None:
    answer = raw_request(
        served.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"root:" not in answer


# --- readers who leave or do not read -----------------------------------------------------------


def test_a_client_that_leaves_frees_everything(served: Served) -> None:
    long = {"max_tokens": 480, "ignore_eos": True, "temperature": 1, "n": 4}
    with (
        served.http() as http,
        http.stream("POST", CHAT, json=body(stream=True, **long)) as response,
    ):
        next(response.iter_lines())
    served.idle()
    # One that waits for a whole answer and goes; and one that goes before anything was made.
    for wait in (0.3, 0.0):
        text = json.dumps(body(**long)).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        with socket.create_connection(("127.0.0.1", served.port)) as link:
            link.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
            time.sleep(wait)
        served.idle()
    with served.http() as http:
        metrics = http.get("/metrics").text
    aborted = next(line for line in metrics.splitlines() if 'finished_reason="abort"' in line)
    assert float(aborted.split()[-1]) >= 4


def test_a_hundred_clients_that_leave_at_any_moment_leak_nothing(served: Served) -> None:
    def visit(number: int) -> None:
        text = json.dumps(body(stream=bool(number % 2), max_tokens=200, temperature=1)).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        with socket.create_connection(("127.0.0.1", served.port)) as link:
            link.sendall(
                head + b"Content-Length: %d\r\n\r\n" % len(text) + text[: len(text) - number % 3]
            )
            time.sleep(0.002 * (number % 17))

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served.idle()
    assert not served.service.engine._driver._streams


def test_a_reader_who_does_not_read_blocks_nobody_and_is_cut_off(
    made_pair: tuple[Path, Path],
) -> None:
    with serving(make_engine(made_pair), stall_seconds=1.0) as served:
        asked = body(stream=True, max_tokens=480, ignore_eos=True, temperature=1, n=8,
                     logprobs=True, top_logprobs=20)  # fmt: skip
        text = json.dumps(asked).encode()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", served.port))
            link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(text) + text)  # fmt: skip
            time.sleep(0.2)
            with served.http() as http:
                assert http.post(CHAT, json=body(max_tokens=5)).is_success
            served.idle(30)
            got = bytearray()
            while part := _receive(link):
                got += part
            assert b"[DONE]" not in got, "it was cut off, not waited for"


def _receive(link: socket.socket) -> bytes:
    link.settimeout(10)
    try:
        return link.recv(1 << 20)
    except ConnectionResetError:
        return b""


# --- too much, and accidents --------------------------------------------------------------------


def test_ten_times_too_much_is_refused_with_a_time_to_come_back(
    made_pair: tuple[Path, Path],
) -> None:
    engine = make_engine(made_pair, max_requests=2)

    async def one(client: AsyncOpenAI, number: int) -> Any:
        try:
            done = await client.chat.completions.create(
                **body(max_tokens=60, temperature=0, seed=number)
            )
        except openai.RateLimitError as error:
            return error
        return done.choices[0].message.content

    async def everybody(base: str) -> list[Any]:
        async with AsyncOpenAI(base_url=base, api_key="x", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, i) for i in range(60)))

    with serving(engine, waiting=4) as served:
        results = asyncio.run(everybody(f"{served.base}/v1"))
        served.idle()
        refused = [r for r in results if isinstance(r, openai.RateLimitError)]
        texts = {r for r in results if isinstance(r, str)}
        assert len(refused) >= 20
        assert len(results) - len(refused) >= 6
        assert len(texts) == 1, "the same question, the same answer"
        for error in refused:
            assert error.code == "rate_limit_exceeded"
            assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert served.service.gate.refused == len(refused)
        with served.http() as http:
            assert http.post(CHAT, json=body(max_tokens=5)).is_success


def test_a_failing_step_fails_its_requests_and_nothing_else(made_pair: tuple[Path, Path]) -> None:
    engine = make_engine(made_pair)
    step, broken = engine.core.step, threading.Event()

    def fragile() -> Any:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("secret detail of the machine")
        return step()

    engine.core.step = fragile
    with serving(engine) as served:
        broken.set()
        with served.http() as http:
            error = fault(http.post(CHAT, json=body(max_tokens=5)), 500)
            assert error["type"] == "server_error"
            assert "secret" not in error["message"]
        served.idle()
        stream = served.client.chat.completions.create(**body(max_tokens=400, stream=True, extra_body={"ignore_eos": True}))  # fmt: skip
        next(iter(stream))
        broken.set()
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(stream)
        served.idle()
        done = served.client.chat.completions.create(**body(max_tokens=5, temperature=0))
        assert done.choices[0].message.content
        with served.http() as http:
            assert (
                'dspark:engine_errors_total{engine="0",model_name="made-pair"} 2.0'
                in http.get("/metrics").text
            )
