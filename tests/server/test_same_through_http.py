"""What comes through HTTP is what the engine says: streamed or whole, alone or among many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from dspark import SamplingParams
from server.serving import CHAT, MODEL, Served, body, chat, fault

CASES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60},
    {"temperature": 1, "max_tokens": 60, "seed": 7},
    {"temperature": 1, "max_tokens": 40, "seed": 8, "n": 3, "stop": ["e", "Bo"]},
    {"temperature": 0.8, "max_tokens": 50, "seed": -5, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 0, "max_tokens": 50, "logit_bias": {"60": 4, "51": -100}},
]


def streamed_chat(served: Served, **fields: Any) -> dict[int, dict[str, Any]]:
    """Choices by index, joined from chunks, and the usage under -1."""
    out: dict[int, dict[str, Any]] = {}
    chunks = served.client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **fields
    )
    for chunk in chunks:
        if chunk.usage is not None:
            assert not chunk.choices
            out[-1] = chunk.usage.model_dump()
        for choice in chunk.choices:
            own = out.setdefault(choice.index, {"text": "", "logprobs": [], "ids": [], "pieces": 0})
            own["text"] += choice.delta.content or ""
            own["ids"] += choice.token_ids
            own["pieces"] += 1
            if choice.logprobs is not None:
                own["logprobs"] += [x.model_dump() for x in choice.logprobs.content]
            if choice.finish_reason is not None:
                own["finish"] = choice.finish_reason
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_streamed_chat_is_the_whole_one(served: Served, case: dict[str, Any]) -> None:
    extra = {"return_token_ids": True}
    asked = {"messages": chat(), "logprobs": True, "top_logprobs": 2, "extra_body": extra, **case}
    whole = served.client.chat.completions.create(model=MODEL, **asked)
    streamed = streamed_chat(served, **asked)
    assert streamed.pop(-1)["completion_tokens"] == whole.usage.completion_tokens
    assert len(whole.choices) == case.get("n", 1) == len(streamed)
    for choice in whole.choices:
        own = streamed[choice.index]
        assert own["text"] == choice.message.content
        assert own["ids"] == choice.token_ids
        assert own["finish"] == choice.finish_reason
        assert own["logprobs"] == [x.model_dump() for x in choice.logprobs.content]
        if len(choice.token_ids) > 20:
            assert own["pieces"] < 0.8 * len(choice.token_ids), "several tokens a chunk"
    assert whole.usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_streamed_completion_is_the_whole_one(served: Served, case: dict[str, Any]) -> None:
    asked = {
        "prompt": [served.service.engine.encode("once"), [70, 71, 72]],
        "logprobs": 1,
        "echo": False,
        **case,
    }
    extra = {"return_token_ids": True}
    whole = served.client.completions.create(model=MODEL, extra_body=extra, **asked)
    out: dict[int, dict[str, list[Any]]] = {}
    for chunk in served.client.completions.create(
        model=MODEL, stream=True, extra_body=extra, **asked
    ):
        for choice in chunk.choices:
            own = out.setdefault(choice.index, {"text": [], "ids": [], "logprobs": []})
            own["text"].append(choice.text)
            own["ids"] += choice.token_ids
            own["logprobs"] += choice.logprobs.token_logprobs
    assert [c.index for c in whole.choices] == list(range(2 * case.get("n", 1)))
    for choice in whole.choices:
        own = out[choice.index]
        assert "".join(own["text"]) == choice.text
        assert own["ids"] == choice.token_ids
        # Two prompts are two requests: whether they meet in one forward is a matter of time.
        assert own["logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert whole.usage.prompt_tokens == len(served.service.engine.encode("once")) + 3


def test_http_says_what_the_engine_says(served: Served) -> None:
    engine = served.service.engine
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=50, n=2, logprobs=1)
    whole = served.client.chat.completions.create(
        model=MODEL, messages=chat("who"), temperature=1, seed=11, max_tokens=50, n=2,
        logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True},
    )  # fmt: skip
    served.idle()
    (offline,) = engine.generate([chat("who")], params)
    for choice, completion in zip(whole.choices, offline.completions, strict=True):
        assert choice.message.content == completion.text
        assert tuple(choice.token_ids) == completion.ids
        assert choice.finish_reason == completion.finish_reason
        values = [entry.logprob for entry in choice.logprobs.content]
        assert values == [x.logprob for x in completion.logprobs][: len(values)]
    assert whole.usage.prompt_tokens == len(offline.prompt_ids)


def test_seeds_repeat_and_differ(served: Served) -> None:
    def text(seed: int) -> list[str | None]:
        done = served.client.chat.completions.create(
            model=MODEL, messages=chat(), seed=seed, n=2, max_tokens=40
        )
        return [choice.message.content for choice in done.choices]

    first = text(5)
    assert text(5) == first
    assert text(6) != first
    assert first[0] != first[1]


def test_stop_strings_across_tokens_and_runs_never_leak(served: Served) -> None:
    """Every possible stop string of a long answer, at every place, streamed."""
    asked = {"messages": chat(), "temperature": 0, "max_tokens": 60}
    whole = served.client.chat.completions.create(model=MODEL, **asked).choices[0].message.content
    letters = [i for i in range(len(whole) - 6) if "\ufffd" not in whole[i : i + 6]]
    assert len(letters) > 10
    for start in letters[::4]:
        for size in (2, 3, 6):
            stop = whole[start : start + size]
            cut = whole[: whole.find(stop)]
            seen, named = "", ""
            for chunk in served.client.chat.completions.create(
                model=MODEL, stream=True, stop=stop, logprobs=True, **asked
            ):
                (choice,) = chunk.choices
                seen += choice.delta.content or ""
                named += "".join(x.token for x in choice.logprobs.content)
                assert cut.startswith(seen), f"{stop!r} leaked"
                last = choice
            assert seen == cut
            assert last.finish_reason == "stop"
            assert last.stop_reason == stop
            # Nor in the log-probabilities, but for a token that began before the stop string did.
            assert len(named) <= len(cut) + 2, (stop, cut, named)
            if "\ufffd" not in named:
                assert named.startswith(cut)


def test_include_stop_keeps_the_string_and_stop_ids_end(served: Served) -> None:
    asked = {"messages": chat(), "temperature": 0, "max_tokens": 60}
    extra = {"return_token_ids": True}
    whole = served.client.chat.completions.create(model=MODEL, extra_body=extra, **asked).choices[0]
    text = whole.message.content
    stop = text[8:11]
    kept = served.client.chat.completions.create(
        model=MODEL, stop=stop, extra_body={"include_stop_str_in_output": True}, **asked
    )
    assert kept.choices[0].message.content == text[: text.find(stop) + 3]
    token = whole.token_ids[12]
    ended = served.client.chat.completions.create(
        model=MODEL, extra_body={"stop_token_ids": [token], **extra}, **asked
    ).choices[0]
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert ended.stop_reason == token


def test_plain_decoding_beside_drafting_gives_the_same_greedy_text(served: Served) -> None:
    asked = {"messages": chat("plain"), "temperature": 0, "max_tokens": 60}
    both = [
        served.client.chat.completions.create(
            model=MODEL, extra_body={"speculate": on, "return_acceptance": True}, **asked
        )
        for on in (True, False)
    ]
    assert both[0].choices[0].message.content == both[1].choices[0].message.content
    assert both[0].dspark["acceptance"]["accepted"] > 5
    assert both[1].dspark["acceptance"] is None


def test_a_request_chooses_its_scheduler_and_keeps_its_greedy_text(served: Served) -> None:
    def answer(scheduler: str | None) -> tuple[str, dict[str, int]]:
        extra = {"return_acceptance": True, "scheduler": scheduler}
        whole = served.client.chat.completions.create(
            model=MODEL, messages=chat("schedule"), temperature=0, max_tokens=60, extra_body=extra
        )
        return whole.choices[0].message.content, whole.dspark["acceptance"]

    text, fixed = answer("fixed")
    assert fixed["admitted"] == fixed["drafted"] > 0
    for scheduler in ("threshold", "sync", "async", None):
        assert answer(scheduler)[0] == text
    assert answer("threshold")[1]["admitted"] < fixed["admitted"]
    with served.http() as http:
        assert fault(http.post(CHAT, json=body(scheduler="best")), 400)["param"] == "scheduler"


def test_acceptance_of_a_request_and_its_steps_agree(served: Served) -> None:
    chunks = served.client.chat.completions.create(
        model=MODEL, messages=chat(), temperature=1, seed=2, max_tokens=50, stream=True,
        extra_body={"return_acceptance": True, "return_token_kinds": True},
    )  # fmt: skip
    steps: list[dict[str, Any]] = []
    text, last = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            steps += choice.dspark["steps"]
            text += choice.delta.content or ""
        last = chunk
    total = last.dspark["acceptance"]
    assert total["accepted"] == sum(s["accepted"] for s in steps)
    assert total["drafted"] == sum(s["drafted"] for s in steps)
    kinds = [t["kind"] for s in steps for t in s["tokens"]]
    assert kinds.count("accepted") == total["accepted"]
    assert kinds[0] == "bonus"
    starts = [t["start"] for s in steps for t in s["tokens"]]
    assert starts == sorted(starts)
    assert starts[-1] < len(text)
    corrected = [s for s in steps if s["tokens"][-1]["kind"] == "corrected"]
    assert corrected
    assert all(s["rejected"] and s["admitted"] > s["accepted"] for s in corrected)


def test_64_clients_at_once_get_their_own_text(served: Served) -> None:
    """Canary prompts: each client's answer alone is its answer among all others."""
    texts = [f"client {i} asks {i * i % 97}" for i in range(64)]

    def params(i: int) -> dict[str, Any]:
        return {"model": MODEL, "messages": chat(texts[i]), "temperature": float(i % 2),
                "seed": i, "max_tokens": 24}  # fmt: skip

    async def one(client: AsyncOpenAI, i: int) -> str:
        if i % 3:
            done = await client.chat.completions.create(**params(i))
            return done.choices[0].message.content or ""
        stream = await client.chat.completions.create(stream=True, **params(i))
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everybody() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{served.base}/v1", api_key="none", max_retries=0, timeout=100
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    together = asyncio.run(everybody())
    served.idle()
    engine = served.service.engine
    alone = engine.generate(
        [chat(text) for text in texts],
        [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=24) for i in range(64)],
    )
    assert together == [output.text for output in alone]
    assert len(set(together[::2])) > 16, "canaries must differ to prove anything"


def test_echo_and_n_and_prompts_are_numbered_as_openai_does(served: Served) -> None:
    done = served.client.completions.create(
        model=MODEL, prompt=["ab", "cd"], n=2, echo=True, max_tokens=3, seed=1
    )
    assert [c.text[:2] for c in done.choices] == ["ab", "ab", "cd", "cd"]
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert done.usage.completion_tokens == 12


def test_the_prefix_cache_is_reported(served: Served) -> None:
    long = chat("a long prompt that fills several pages of the cache, to be asked twice " * 3)
    first, second = (
        served.client.chat.completions.create(
            model=MODEL, messages=long, max_tokens=4, temperature=0
        )
        for _ in range(2)
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 160
    assert first.choices[0].message.content == second.choices[0].message.content
