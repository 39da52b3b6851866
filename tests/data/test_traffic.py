"""Logged requests become prompts without what must not be kept."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from dspark.config.prompts import TrafficSource
from dspark.data.scrub import scrub, scrubber
from dspark.data.sources import Reader, candidates_of, prompts_of
from dspark.errors import ConfigError, DataError

BODY = {
    "model": "big",
    "user": "u-77",
    "messages": [
        {"role": "user", "content": "Mail ada.lovelace@example.org or call +44 20 7946 0958"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "From 192.168.10.7 with key sk-proj-abcdefghijklmnop1234"},
    ],
}


def log(tmp_path, *rows):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(path, **fields):
    return TrafficSource(**({"kind": "traffic", "path": str(path), "train": "all"} | fields))


@pytest.mark.parametrize(
    "row",
    [
        BODY,
        {"request": BODY, "response": {"choices": []}},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"request": {"headers": {"authorization": "Bearer secret"}, "body": json.dumps(BODY)}},
        {"model": "big", "input": BODY["messages"]},
    ],
)
def test_every_way_to_log_a_request_gives_the_same_scrubbed_prompt(tmp_path, row):
    (prompt,) = prompts_of(source(log(tmp_path, row)))
    assert prompt.texts == ["Mail <EMAIL> or call <PHONE>", "From <IP> with key <KEY>"]
    assert prompt.category == "traffic"
    assert "u-77" not in prompt.model_dump_json()
    assert "secret" not in prompt.model_dump_json()


def test_instructions_and_tools_are_scrubbed_too(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "description": "ask bob@example.com"}}
    row = {"input": "hello there", "instructions": "You serve carol@example.com", "tools": [tool]}
    (prompt,) = prompts_of(source(log(tmp_path, row)))
    assert prompt.messages[0] == {"role": "system", "content": "You serve <EMAIL>"}
    row = {"messages": BODY["messages"], "tools": [tool]}
    (prompt,) = prompts_of(source(log(tmp_path, row)))
    assert prompt.tools[0]["function"]["description"] == "ask <EMAIL>"


def test_what_was_replaced_is_counted(tmp_path):
    wanted = source(log(tmp_path, BODY))
    reader = Reader(wanted)
    for candidate in candidates_of(wanted):
        reader.prompt(candidate)
    assert dict(reader.scrubbed) == {"email": 1, "phone": 1, "ip": 1, "key": 1, "card": 0} or (
        {k: n for k, n in reader.scrubbed.items() if n}
        == {"email": 1, "phone": 1, "ip": 1, "key": 1}
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("write to a.b+c@mail.example.co.uk.", "write to <EMAIL>."),
        ("call (415) 555-2671 now", "call <PHONE> now"),
        ("call 415-555-2671 now", "call <PHONE> now"),
        ("ring 0171 555 2671 now", "ring <PHONE> now"),
        ("host 10.0.0.254:8080", "host <IP>:8080"),
        ("v6 2001:db8::ff00:42:8329 up", "v6 <IP> up"),
        ("card 4111 1111 1111 1111 ok", "card <CARD> ok"),
        ("AKIAABCDEFGHIJKLMNOP", "<KEY>"),
        ("hf_abcdefghijklmnopqrstuvwx", "<KEY>"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "<KEY>"),
        ("Authorization: Bearer abcdefghijklmnop.qrst", "Authorization: Bearer <KEY>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", "<KEY>"),
    ],
)
def test_the_default_finds(text, clean):
    assert scrub(text, Counter()) == clean


@pytest.mark.parametrize(
    "text",
    [
        "2 + 2 = 4 and 3.14159265 is pi",
        "order 4111 1111 1111 1112 is not a card",
        "version 1.2.3.4.5 and 300.1.1.1",
        "from 2024-05-17 to 2024-06-18 at 12:30:45",
        "a[1:2:3] and std::vector<int> x::y",
        "1, 2, 3, 5, 8, 13, 21, 34, 55, 89",
        "the sum 1234567890123456789012345",
        "def f(x): return x @ y",
        "sk-learn is a library",
    ],
)
def test_the_default_leaves_alone(text):
    counts: Counter[str] = Counter()
    assert scrub(text, counts) == text
    assert not counts.total()


def test_own_scrubber_replaces_the_default(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def hide(text):\n    return text.replace('Mail', 'X')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (prompt,) = prompts_of(source(log(tmp_path, BODY), scrub="mine:hide"))
    assert prompt.texts[0].startswith("X ada.lovelace@example.org")
    (prompt,) = prompts_of(source(log(tmp_path, BODY), scrub="none"))
    assert prompt.texts[0].startswith("Mail ada.lovelace@")


def test_a_scrubber_that_is_not_there_or_returns_no_text_is_an_error(tmp_path, monkeypatch):
    for name in ("no_such_module_here:f", "json:no_such_function"):
        with pytest.raises(ConfigError, match="module:function"):
            scrubber(name)
    with pytest.raises(ConfigError, match="returns a text"):
        scrubber("builtins:len")("text", Counter())


def test_a_line_without_a_request_is_refused(tmp_path):
    for row in ({"request": "no json"}, {"body": [1]}, {"status": 200}):
        with pytest.raises(DataError, match="line 1"):
            list(prompts_of(source(log(tmp_path, row))))
