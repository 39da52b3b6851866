"""An OpenAI-compatible server for tests, over real HTTP: it renders, generates and reports ids.

Rendering is done here with jinja2 alone, not by the code under test. What generates is either the
embedded engine on a real target, or a script (text of the prompt -> text of the answer). ``spoil``
changes replies before they are sent: how a test makes a server lie.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from client.scripted_server import Reply, Seen

Spoil = Callable[[dict[str, Any], Seen], Any]

LLAMA3 = (
    "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# Reasoning of answers before the last user turn is dropped, as most templates do.
CHATML = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# Reasoning stays, tools are declared first, effort is a system line.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% if reasoning_effort %}<|im_system|>effort<|im_middle|>{{ reasoning_effort }}<|im_end|>"
    "{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
SPECIAL = {
    LLAMA3: ["<|eot|>", "<|begin|>", "<|header|>", "<|/header|>"],
    CHATML: ["<|im_end|>", "<|im_start|>"],
    KIMI: ["<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|call|>"],
}  # fmt: skip


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Every byte a token, so that any text goes there and back; the first special one ends turns."""
    special = SPECIAL[template]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special[0], chat_template=template
    )


class AnsweringServer:
    """The script of one server; give it to ``scripted``."""

    def __init__(
        self,
        tokenizer: Any,
        generate: Callable[[list[int], dict[str, Any]], list[int]],
        *,
        model: str = "tiny",
        reasoning: str | None = None,
        spoil: Spoil | None = None,
        length: int | None = None,
    ) -> None:
        self.tokenizer, self.generate, self.model = tokenizer, generate, model
        self.reasoning, self.spoil, self.length = reasoning, spoil, length
        self.answered = 0
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return Reply({"data": [{"id": self.model, "max_model_len": self.length}]})
        body = seen.body
        chat = seen.path.endswith("/chat/completions")
        prompt = self.render(body) if chat else body["prompt"]
        with self._lock:
            ids = self.generate(prompt, body)
            self.answered += 1
        reply = self.reply(prompt, ids, body, chat)
        if self.spoil is not None:
            changed = self.spoil(reply, seen)
            return changed if isinstance(changed, Reply) else Reply(changed)
        return Reply(reply)

    def render(self, body: dict[str, Any]) -> list[int]:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        messages = []
        for message in body["messages"]:
            calls = [
                {"function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                for c in message.get("tool_calls") or []
            ]
            messages.append({**message, "tool_calls": calls})
        text = environment.from_string(self.tokenizer.chat_template).render(
            messages=messages,
            tools=body.get("tools"),
            add_generation_prompt=True,
            **body.get("chat_template_kwargs", {}),
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def reply(
        self, prompt: list[int], ids: list[int], body: dict[str, Any], chat: bool
    ) -> dict[str, Any]:
        stopped = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        written = self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if stopped else "length",
            "token_ids": ids,
        }
        reply = {
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }
        if not chat:
            choice |= {"text": written, "prompt_token_ids": prompt}
            return reply
        message: dict[str, Any] = {"role": "assistant", "content": written}
        if self.reasoning is not None and "</think>" in written:
            before, _, after = written.partition("</think>")
            message = {
                "role": "assistant",
                "content": after.strip("\n"),
                self.reasoning: before.removeprefix("<think>").strip("\n"),
            }
        if "<|call|>" in written:
            name, brace, arguments = written.partition("<|call|>")[2].partition("{")
            function = {"name": name, "arguments": brace + arguments}
            message["content"] = None
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            choice["finish_reason"] = "tool_calls"
        choice["message"] = message
        return reply | {"prompt_token_ids": prompt}


def by_script(tokenizer: Any, answer: Callable[[str], str]) -> Callable[..., list[int]]:
    """A model that writes what ``answer`` says to the text of the prompt, and its end of turn."""

    def generate(prompt: list[int], body: dict[str, Any]) -> list[int]:
        text = answer(tokenizer.decode(prompt, skip_special_tokens=False))
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return ids[: body["max_tokens"]]

    return generate


def by_engine(model: Any, end_ids: frozenset[int]) -> Callable[..., list[int]]:
    """The embedded engine on a real target."""
    from dspark.decoding.params import SamplingParams
    from dspark.decoding.request import GenerationRequest
    from dspark.engine.generate import BatchGenerator

    def generate(prompt: list[int], body: dict[str, Any]) -> list[int]:
        params = SamplingParams(
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            seed=body["seed"],
            max_new_tokens=body["max_tokens"],
        )
        found: list[int] = []
        engine = BatchGenerator(model, end_ids, 1, len(prompt) + body["max_tokens"])
        request = GenerationRequest("one", tuple(prompt), params)
        engine.run([request], lambda result: found.extend(result.ids))
        return found

    return generate
