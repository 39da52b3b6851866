"""The client against real HTTP servers that behave well, badly, and not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from client.scripted_server import Reply, Script, Seen, scripted
from dspark.client import Client, Endpoint, Retry, Timeouts
from dspark.client.endpoint import retry_after
from dspark.errors import ConfigError, EndpointError

QUICK = Retry(attempts=3, first=0.01, most=0.02)
ASK = {"messages": [{"role": "user", "content": "hello"}]}


def chat(text: str = "hi", **changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    return {"model": "m", "choices": [choice | changes.pop("choice", {})], **changes}


def models(*names: str) -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": "vllm", "max_model_len": 64} for name in names]}


def serving(reply: Callable[[Seen], Reply]) -> Script:
    return lambda seen: Reply(models("m")) if seen.path == "/v1/models" else reply(seen)


def run(
    use: Callable[[Client], Awaitable[Any]],
    *endpoints: Endpoint,
    connect: bool = True,
    **options: Any,
) -> Any:
    async def go() -> Any:
        async with Client(endpoints, **{"retry": QUICK, **options}) as client:
            if connect:
                await client.connect()
            return await use(client)

    return asyncio.run(go())


def ask(client: Client) -> Awaitable[Any]:
    return client.request("chat", ASK)


def silent_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("place", ["root", "choice"])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_ids_and_reasoning_are_found_wherever_a_server_puts_them(place: str, name: str) -> None:
    message = {"content": "hi", name: "because", "tool_calls": [{"id": "1"}]}
    reply = chat(choice={"message": message, "token_ids": [7, 2], "stop_reason": 2})
    (reply if place == "root" else reply["choices"][0])["prompt_token_ids"] = [1, 5]
    reply["usage"] = {"prompt_tokens": 2, "completion_tokens": 2}
    with scripted(serving(lambda _: Reply(reply))) as server:
        got = run(ask, Endpoint(server.url))
    choice = got.choices[0]
    assert (got.prompt_ids, choice.token_ids, choice.stop_reason) == ((1, 5), (7, 2), 2)
    assert (choice.text, choice.reasoning, choice.tool_calls) == ("hi", "because", ({"id": "1"},))
    assert (got.usage.prompt, got.usage.completion, got.model) == (2, 2, "m")


def test_a_reply_without_ids_says_none_and_not_an_empty_list() -> None:
    with scripted(serving(lambda _: Reply(chat()))) as server:
        got = run(ask, Endpoint(server.url))
    assert got.prompt_ids is None
    assert got.choices[0].token_ids is None


def test_logprobs_of_both_protocols_read_alike() -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    of_chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}
    plain = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}]}

    def reply(seen: Seen) -> Reply:
        if seen.path.endswith("chat/completions"):
            return Reply(chat(choice={"logprobs": of_chat}))
        choice = {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": plain}
        return Reply({"model": "m", "choices": [choice]})

    async def both(client: Client) -> list[Any]:
        done = [await ask(client), await client.request("completion", {"prompt": [1, 2]})]
        return [got.choices[0].logprobs for got in done]

    with scripted(serving(reply)) as server:
        first, second = run(both, Endpoint(server.url))
    assert first == second
    assert first[0].top == (("a", -0.5), ("b", -1.5))


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    answers = iter([Reply("busy", status=status), Reply("", cut=True), Reply(chat("third"))])
    with scripted(serving(lambda _: next(answers))) as server:
        got = run(ask, Endpoint(server.url))
        assert len(server.asked("/v1/chat/completions")) == 3
    assert got.choices[0].text == "third"


def test_retry_after_is_waited_in_full_and_by_every_request_to_that_endpoint() -> None:
    answers = iter([Reply("full", status=429, headers={"Retry-After": "1.5"})])
    with scripted(serving(lambda _: next(answers, Reply(chat())))) as server:

        async def two(client: Client) -> None:
            first = asyncio.create_task(ask(client))
            await asyncio.sleep(0.75)
            await asyncio.gather(first, ask(client))

        run(two, Endpoint(server.url))
        refused, *later = server.asked("/v1/chat/completions")
    assert len(later) == 2
    assert min(seen.at - refused.at for seen in later) >= 1.5


def test_retry_after_may_be_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < (retry_after(later) or 0) <= 30
    assert (retry_after("3"), retry_after("soon"), retry_after(None)) == (3.0, None, None)


def test_a_wait_without_end_is_not_waited() -> None:
    full = Reply("full", status=503, headers={"Retry-After": "86400"})
    with (
        scripted(serving(lambda _: full)) as server,
        pytest.raises(EndpointError, match="asks to wait 86400 s"),
    ):
        run(ask, Endpoint(server.url))


def test_a_refusal_is_named_and_not_repeated() -> None:
    with scripted(serving(lambda _: Reply({"error": "no such field"}, status=400))) as server:
        with pytest.raises(EndpointError, match="no such field") as caught:
            run(ask, Endpoint(server.url))
        assert len(server.asked("/v1/chat/completions")) == 1
        assert server.url in caught.value.where


def test_a_dead_endpoint_is_named_with_the_way_it_failed() -> None:
    url = silent_port()
    with pytest.raises(EndpointError, match="ConnectError") as caught:
        run(ask, Endpoint(url))
    assert url in caught.value.where


def test_a_server_that_never_answers_is_given_up_after_the_timeout() -> None:
    with (
        scripted(serving(lambda _: Reply(chat(), seconds=1.0))) as server,
        pytest.raises(EndpointError, match="ReadTimeout"),
    ):
        run(ask, Endpoint(server.url), timeouts=Timeouts(read=0.1))


def test_others_take_over_from_an_endpoint_that_dies() -> None:
    sick = scripted(serving(lambda _: Reply("", cut=True)))
    well = scripted(serving(lambda _: Reply(chat("well"), seconds=0.01)))
    with sick as one, well as other:

        async def many(client: Client) -> Any:
            done = await asyncio.gather(*(ask(client) for _ in range(12)))
            return [got.choices[0].text for got in done], dict(client.lost)

        texts, lost = run(
            many, Endpoint(one.url, concurrency=2), Endpoint(other.url, concurrency=2)
        )
    assert texts == ["well"] * 12
    assert list(lost) == [one.url]
    assert "RemoteProtocolError" in lost[one.url]


def test_when_all_are_dead_each_is_named() -> None:
    sick = serving(lambda _: Reply("no memory", status=500))
    with (
        scripted(sick) as one,
        scripted(sick) as other,
        pytest.raises(EndpointError, match="no memory") as caught,
    ):
        run(ask, Endpoint(one.url), Endpoint(other.url))
    assert one.url in caught.value.where
    assert other.url in caught.value.where


def test_no_endpoint_gets_more_at_once_than_its_concurrency() -> None:
    slow = serving(lambda _: Reply(chat(), seconds=0.03))
    with scripted(slow) as one, scripted(slow) as other:

        async def many(client: Client) -> None:
            await asyncio.gather(*(ask(client) for _ in range(24)))

        run(many, Endpoint(one.url, concurrency=1), Endpoint(other.url, concurrency=4))
        assert (one.most_at_once, other.most_at_once) == (1, 4)
        assert (
            len(one.asked("/v1/chat/completions")) + len(other.asked("/v1/chat/completions")) == 24
        )


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("<html>login</html>", "login"),
        ({"choices": []}, "choices"),
        ([1], "JSON object"),
        (chat(choice={"token_ids": ["a"]}), "token_ids"),
        (chat(choice={"message": {"content": 5}}), "content as text"),
        (chat(usage={"prompt_tokens": "many"}), "usage"),
    ],
)
def test_a_reply_that_is_no_reply_is_never_an_empty_answer(body: Any, found: str) -> None:
    with (
        scripted(serving(lambda _: Reply(body))) as server,
        pytest.raises(EndpointError, match=found) as caught,
    ):
        run(ask, Endpoint(server.url))
    assert server.url in caught.value.where


@pytest.mark.parametrize(
    ("served", "wanted", "found"),
    [(("other",), "m", "serves other"), (("a", "b"), None, "serves a, b"), ((), None, "none")],
)
def test_a_server_of_another_model_is_refused_before_any_work(
    served: tuple[str, ...], wanted: str | None, found: str
) -> None:
    with (
        scripted(lambda _: Reply(models(*served))) as server,
        pytest.raises(EndpointError, match=found),
    ):
        run(ask, Endpoint(server.url, model=wanted))


def test_the_key_is_sent_and_never_shown() -> None:
    endpoint = Endpoint("http://127.0.0.1:1", api_key="secret-7")
    assert "secret-7" not in repr(endpoint)
    with scripted(serving(lambda _: Reply("no", status=401))) as server:
        with pytest.raises(EndpointError, match="401") as caught:
            run(ask, Endpoint(server.url, api_key="secret-7"))
        assert all(seen.headers["authorization"] == "Bearer secret-7" for seen in server.seen)
    assert "secret-7" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://user:hunter2@host", "http://h/v1?k=1"]
)
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoint(url)
    assert "hunter2" not in str(caught.value)


def piece(text: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, **more}]
    return {"model": "m", "choices": choices}


async def collect(client: Client) -> list[Any]:
    return [chunk async for chunk in client.stream("chat", ASK)]


def test_a_stream_gives_pieces_in_order_with_ids_times_and_usage() -> None:
    first = piece("he", token_ids=[4]) | {"prompt_token_ids": [1, 2]}
    last = piece() | {"usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    pieces = [first, piece("y", token_ids=[5], finish_reason="stop"), last]
    with scripted(serving(lambda _: Reply(pieces=pieces))) as server:
        chunks = run(collect, Endpoint(server.url))
        body = server.asked("/v1/chat/completions")[0].body
    assert body["stream_options"] == {"include_usage": True}
    assert [c.choice.text for c in chunks[:2]] == ["he", "y"]
    assert [c.choice.token_ids for c in chunks[:2]] == [(4,), (5,)]
    assert chunks[0].prompt_ids == (1, 2)
    assert chunks[2].usage.completion == 2
    assert [c.at for c in chunks] == sorted(c.at for c in chunks)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (Reply(pieces=[piece("he")], cut=True), "broke off"),
        (Reply(pieces=[piece("he")], done=False), "without"),
        (Reply(pieces=[piece("he"), {"error": {"message": "cuda"}}]), "cuda"),
        (Reply(chat()), "event-stream"),
    ],
)
def test_a_stream_that_does_not_end_well_is_an_error(reply: Reply, found: str) -> None:
    with (
        scripted(serving(lambda _: reply)) as server,
        pytest.raises(EndpointError, match=found),
    ):
        run(collect, Endpoint(server.url))


def test_a_stream_is_begun_again_only_before_its_first_piece() -> None:
    answers = iter([Reply("busy", status=503), Reply(pieces=[piece("x")])])
    with scripted(serving(lambda _: next(answers))) as server:
        chunks = run(collect, Endpoint(server.url))
    assert [c.choice.text for c in chunks] == ["x"]


def test_metrics_are_read_from_the_server_itself() -> None:
    def script(seen: Seen) -> Reply:
        return Reply("a 1" if seen.path == "/metrics" else models("m"))

    with scripted(script) as server:
        endpoint = Endpoint(server.url + "/v1/")
        assert run(lambda client: client.get_text(endpoint, "/metrics"), endpoint) == "a 1"
