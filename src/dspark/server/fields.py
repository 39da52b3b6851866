"""Fields that clients of other servers send and that this one does not follow.

A field that would change the answer is refused with a message that names it and says what to do
instead; the values of it that change nothing (most clients send defaults) are let through. What is
in neither the schema nor this table is not known at all, and is refused too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError


class Unfollowed(NamedTuple):
    """``harmless`` values say what would happen anyway; null is always one."""

    instead: str
    harmless: tuple[Any, ...] = ()


_OFF: tuple[Any, ...] = (False,)
_GONE = 'vLLM removed it. Send structured_outputs: {{"{0}": ...}}'
UNFOLLOWED = {
    # OpenAI
    "audio": Unfollowed("This server answers in text."),
    "functions": Unfollowed("Send tools.", ([],)),
    "function_call": Unfollowed("Send tool_choice."),
    "modalities": Unfollowed("This server answers in text.", (["text"],)),
    "verbosity": Unfollowed("Ask for it in the messages.", ("medium",)),
    "web_search_options": Unfollowed("Offer a search function in tools."),
    "suffix": Unfollowed("Put the text around the gap into the prompt.", ("",)),
    # vLLM: other ways of sampling
    "use_beam_search": Unfollowed("Ask for n answers.", _OFF),
    "length_penalty": Unfollowed("It belongs to beam search.", (1, 1.0)),
    "allowed_token_ids": Unfollowed("Use structured_outputs, or logit_bias."),
    "bad_words": Unfollowed("Use logit_bias with token ids.", ([],)),
    "repetition_detection": Unfollowed("Use max_tokens or stop."),
    "thinking_token_budget": Unfollowed("Use reasoning_effort, if the target knows it."),
    "include_reasoning": Unfollowed("Reasoning is part of the text here.", (True,)),
    "watermarking": Unfollowed("This server has none.", _OFF),
    "logits_processors": Unfollowed("Use logit_bias or structured_outputs.", ([],)),
    "vllm_xargs": Unfollowed("They belong to plug-ins of vLLM.", ({},)),
    # vLLM: other prompts and other answers
    "echo": Unfollowed("The text is the last of your own messages.", _OFF),
    "chat_template": Unfollowed("The target's own template is used; it is what the draft learnt."),
    "truncate_prompt_tokens": Unfollowed("Shorten the prompt yourself."),
    "truncation_side": Unfollowed("Shorten the prompt yourself."),
    "prompt_embeds": Unfollowed("Send texts or token ids."),
    "mm_processor_kwargs": Unfollowed("The target reads text."),
    "media_io_kwargs": Unfollowed("The target reads text."),
    "prompt_logprobs": Unfollowed("Only generated tokens have log-probabilities."),
    "logprob_token_ids": Unfollowed("Ask for the most likely ones: top_logprobs or logprobs."),
    "return_token_offsets": Unfollowed("Ask for logprobs; they have text_offset.", _OFF),
    "return_prompt_text": Unfollowed("Ask for return_token_ids.", _OFF),
    # vLLM: the machine room
    "priority": Unfollowed("First come, first served.", (0,)),
    "cache_salt": Unfollowed("The prefix cache is shared; start a server without one."),
    "kv_transfer_params": Unfollowed("One process does prefill and decoding here."),
    "ec_transfer_params": Unfollowed("One process does prefill and decoding here."),
    "guided_json": Unfollowed(_GONE.format("json")),
    "guided_regex": Unfollowed(_GONE.format("regex")),
    "guided_choice": Unfollowed(_GONE.format("choice")),
    "guided_grammar": Unfollowed(_GONE.format("grammar") + ", in Lark"),
    "guided_decoding_backend": Unfollowed("There is one: llguidance."),
    "guided_whitespace_pattern": Unfollowed("White space is bounded here anyway."),
}

# What a template may not be given under ``chat_template_kwargs``: parameters of the function that
# renders it, of which some have a field of their own.
RENDERER = frozenset({
    "self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    "sanitize_control_tokens",
})  # fmt: skip


def without_unfollowed(data: Any, own: frozenset[str]) -> Any:
    """``data`` of a body without the harmless values of fields that are not among its ``own``.

    Raises:
        PydanticCustomError: a value that would have to be followed; ``param`` names the field.
    """
    if not isinstance(data, dict):
        return data
    for name in UNFOLLOWED.keys() & data.keys() - own:
        value, known = data[name], UNFOLLOWED[name]
        if value is not None and not any(
            type(value) is type(other) and value == other for other in known.harmless
        ):
            raise wrong(name, f"{name} is not supported. {known.instead}")
    return {name: value for name, value in data.items() if name in own or name not in UNFOLLOWED}


def wrong(param: str, message: str) -> PydanticCustomError:
    """A finding about the field ``param`` that shows in OpenAI's error shape as it is."""
    return PydanticCustomError("unsupported", message, {"param": param})
