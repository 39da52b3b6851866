"""What may stand in a request: for the template, for the sampling, for nothing, or for a 400."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from dspark.server.fields import RENDERER, UNFOLLOWED
from dspark.server.metrics import HISTOGRAMS
from dspark.server.protocol import ChatRequest, CompletionRequest
from server.serving import CHAT, MODEL, Served, body, chat, fault, make_engine, serving

COMPLETIONS = "/v1/completions"


def prompt_of(served: Served, **fields: Any) -> str:
    """The prompt that a chat request became, special tokens shown."""
    with served.http() as http:
        asked = {"max_tokens": 1, "return_token_ids": True, **fields}
        answer = http.post(CHAT, json=body(**asked))
        assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return str(served.service.engine.tokenizer.decode(choice["prompt_token_ids"]))


PLAIN = "<bos><user>hi<assistant>"


def test_an_effort_reaches_the_template_and_says_whether_to_think(served: Served) -> None:
    assert prompt_of(served) == PLAIN
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        expected = f"<bos><system>effort {effort}<system>thinking True<user>hi<assistant>"
        assert prompt_of(served, reasoning_effort=effort) == expected
    assert "<system>thinking False<user>" in prompt_of(served, reasoning_effort="none")
    told = {"enable_thinking": False, "reasoning_effort": "of the template"}
    both = prompt_of(served, reasoning_effort="high", chat_template_kwargs=told)
    assert both == "<bos><system>effort high<system>thinking False<user>hi<assistant>"
    done = served.client.chat.completions.create(
        model=MODEL, messages=chat("hi"), reasoning_effort="low", max_tokens=1
    )
    plain = served.client.chat.completions.create(model=MODEL, messages=chat("hi"), max_tokens=1)
    assert done.usage.prompt_tokens > plain.usage.prompt_tokens
    with served.http() as http:
        error = fault(http.post(CHAT, json=body(reasoning_effort="enormous")), 400)
    assert error["param"] == "reasoning_effort"
    assert "'xhigh'" in error["message"]


def test_variables_reach_the_template_and_unknown_ones_change_nothing(served: Served) -> None:
    shown = prompt_of(served, chat_template_kwargs={"enable_thinking": True})
    assert shown == "<bos><system>thinking True<user>hi<assistant>"
    unknown = {"thinking_mode": [1, {"a": None}], "wordy": True}
    assert prompt_of(served, chat_template_kwargs=unknown) == PLAIN
    assert prompt_of(served, chat_template_kwargs={}, documents=None) == PLAIN
    documents = [{"title": "sea", "text": "blue"}, {"title": "sky", "text": "grey"}]
    expected = "<bos><system>sea: blue<system>sky: grey<user>hi<assistant>"
    assert prompt_of(served, documents=documents) == expected


def test_variables_are_measured_before_a_tokenizer_spends_seconds_on_them(served: Served) -> None:
    long = "x" * 10**6
    assert prompt_of(served, chat_template_kwargs={"unused": long}) == PLAIN
    with served.http() as http:
        asked = body(chat_template_kwargs={"reasoning_effort": long})
        error = fault(http.post(CHAT, json=asked), 400)
    assert error["code"] == "context_length_exceeded"


def test_variables_cannot_steer_the_renderer(served: Served) -> None:
    parameters = inspect.signature(served.service.engine.tokenizer.apply_chat_template).parameters
    assert set(parameters) <= RENDERER
    with served.http() as http:
        for name in sorted(RENDERER):
            asked = body(chat_template_kwargs={name: "{{ 7 * 7 }}"})
            error = fault(http.post(CHAT, json=asked), 400)
            assert error["param"] == "chat_template_kwargs"
            assert name in error["message"]


def test_the_last_turn_can_be_continued_or_left_closed(served: Served) -> None:
    turns = [*chat("hi"), {"role": "assistant", "content": "Once upon"}]
    opened = prompt_of(served, messages=turns, continue_final_message=True)
    assert opened == "<bos><user>hi<assistant>Once upon"
    closed = prompt_of(served, messages=turns, add_generation_prompt=False)
    assert closed == "<bos><user>hi<assistant>Once upon<eos>"
    with served.http() as http:
        both = body(messages=turns, continue_final_message=True, add_generation_prompt=True)
        assert fault(http.post(CHAT, json=both), 400)["param"] == "continue_final_message"


VALUES: dict[str, Any] = {
    "modalities": ["audio"], "verbosity": "low", "length_penalty": 2.0, "include_reasoning": False,
    "priority": -1, "bad_words": ["x"], "functions": [{"name": "f"}], "suffix": "end",
    "logits_processors": ["x"], "vllm_xargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_is_not_followed_is_refused_by_name_unless_it_changes_nothing(
    served: Served, name: str
) -> None:
    for path, kind in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
        if name in kind.model_fields:
            continue
        asked = body(max_tokens=1) if path == CHAT else {"prompt": "x", "max_tokens": 1}
        with served.http() as http:
            for value in (None, *UNFOLLOWED[name].harmless):
                answer = http.post(path, json={**asked, name: value})
                assert answer.status_code == 200, answer.text
            error = fault(http.post(path, json={**asked, name: VALUES.get(name, True)}), 400)
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not supported. ")
        assert UNFOLLOWED[name].instead in error["message"]


def test_what_clients_send_along_is_let_through(served: Served) -> None:
    usual: dict[str, Any] = {
        "user": "u1", "store": True, "metadata": {"a": "b"}, "service_tier": "flex",
        "parallel_tool_calls": True, "seed": 3, "tools": [], "safety_identifier": "s",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "session_id": "s",
        "stream_interval": 4, "spaces_between_special_tokens": False, "logit_bias": {},
        "prediction": {"type": "content", "content": "hello"}, "tool_choice": "auto",
        "n": 1, "stop": None, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": [], "add_special_tokens": False, "echo": False,
    }  # fmt: skip
    assert prompt_of(served, **usual) == PLAIN
    plain = served.client.chat.completions.create(
        model=MODEL, messages=chat("hi"), seed=3, max_tokens=20
    )
    done = served.client.chat.completions.create(
        model=MODEL, messages=chat("hi"), max_tokens=20, extra_body=usual
    )
    assert done.choices[0].message.content == plain.choices[0].message.content


def test_special_tokens_are_shown_where_that_is_asked(served: Served) -> None:
    special = served.service.engine.tokenizer.convert_tokens_to_ids("<unk>")
    asked = {
        "model": MODEL, "prompt": "x", "max_tokens": 3, "temperature": 0,
        "logit_bias": {str(special): 100},
    }  # fmt: skip
    hidden = served.client.completions.create(**asked)
    shown = served.client.completions.create(**asked, extra_body={"skip_special_tokens": False})
    assert (hidden.choices[0].text, shown.choices[0].text) == ("", "<unk>" * 3)
    ended = served.client.completions.create(
        **asked, stop="><", extra_body={"skip_special_tokens": False}
    )
    assert ended.choices[0].text == "<unk"


def test_request_ids_and_tokens_as_ids_come_back_as_asked(served: Served) -> None:
    extra = {"request_id": "mine-1", "return_tokens_as_token_ids": True, "return_token_ids": True}
    talk = served.client.chat.completions.create(
        model=MODEL, messages=chat(), max_tokens=5, logprobs=True, extra_body=extra
    )
    text = served.client.completions.create(
        model=MODEL, prompt="x", max_tokens=5, logprobs=1, extra_body=extra
    )
    assert (talk.id, text.id) == ("chatcmpl-mine-1", "cmpl-mine-1")
    names = [entry.token for entry in talk.choices[0].logprobs.content]
    assert names == [f"token_id:{i}" for i in talk.choices[0].token_ids[: len(names)]]
    assert set(text.choices[0].logprobs.tokens) <= {
        f"token_id:{i}" for i in text.choices[0].token_ids
    }
    with pytest.raises(openai.BadRequestError, match="request_id"):
        served.client.completions.create(model=MODEL, prompt="x", extra_body={"request_id": "a\nb"})


def test_completions_begin_with_special_tokens_unless_told_not_to(
    made_pair: tuple[Path, Path],
) -> None:
    from tokenizers.processors import TemplateProcessing

    engine = make_engine(made_pair)
    engine.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    with serving(engine) as served:
        asked = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        usual, bare = (
            served.client.completions.create(
                **asked, extra_body={"add_special_tokens": on, "return_token_ids": True}
            ).choices[0]
            for on in (True, False)
        )
        assert usual.prompt_token_ids == [1, *bare.prompt_token_ids]


def test_any_json_object_can_be_asked_for_in_vllms_way(served: Served) -> None:
    done = served.client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, seed=1, stop=None,
        extra_body={"structured_outputs": {"json_object": True}},
    )  # fmt: skip
    assert done.choices[0].text.startswith("{")
    with pytest.raises(openai.BadRequestError, match="exactly one of"):
        served.client.completions.create(
            model=MODEL, prompt="x",
            extra_body={"structured_outputs": {"json_object": False}},
        )  # fmt: skip


def test_the_table_in_the_docs_names_every_field_and_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_:]+)`", text))
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    unnamed = {
        name for name in fields | set(UNFOLLOWED)
        if name not in named and not name.startswith("guided_")
    }  # fmt: skip
    assert not unnamed
    assert {f"vllm:{name}" for name in HISTOGRAMS} <= named


def test_an_answer_that_may_neither_end_nor_go_on_is_refused(served: Served) -> None:
    """In the middle of a batch it would fail the others with it."""
    every = list(range(served.service.engine.core.target.vocab_size))
    asked = body(stop_token_ids=every, min_tokens=1, max_tokens=3)
    with served.http() as http:
        assert fault(http.post(CHAT, json=asked), 400)["param"] == "stop_ids"
        assert http.post(CHAT, json={**asked, "min_tokens": 0}).status_code == 200


def test_a_grammar_without_an_end_is_refused_before_it_fails_a_batch(served: Served) -> None:
    asked = body(structured_outputs={"grammar": 'start: "a" start'}, max_tokens=5)
    with served.http() as http:
        assert fault(http.post(CHAT, json=asked), 400)["param"] == "grammar"
