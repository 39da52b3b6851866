"""From a request's fields to the engine's :class:`SamplingParams`."""

from __future__ import annotations

import json
from typing import Any

from dspark.decoding.params import Grammar, SamplingParams
from dspark.server.errors import bad_request
from dspark.server.protocol import ResponseFormat, Sampling, StructuredOutputs

DEFAULT_TEMPERATURE = 1.0
ANY_OBJECT: dict[str, Any] = {"type": "object"}
WHITE_SPACE = r"(\n {0,16}| ?)"
"""What may stand between two parts of a JSON answer: enough to indent, too little to never end."""


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int | None,
    room: int,
    logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """Parameters for a prompt that leaves ``room`` tokens of the context.

    Args:
        max_tokens: as asked; None takes all the room there is.
        logprobs: None for none.
        grammar: what the answer must match.

    Raises:
        APIError: more tokens than there is room for; a bias on what is no token id.
        DecodingError: a value that the engine refuses.
    """
    if max_tokens is not None and max_tokens > room:
        raise bad_request(
            f"max_tokens is too large: {max_tokens}. The prompt leaves room for {room} tokens.",
            "max_tokens",
            "context_length_exceeded",
        )
    seed = body.seed
    fields: dict[str, Any] = {
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        "top_k": max(body.top_k or 0, 0),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "min_p": body.min_p or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": body.repetition_penalty or 1.0,
        "logit_bias": _biases(body.logit_bias or {}),
        "seed": None if seed is None else seed % 2**63,
        "n": body.n or 1,
        "max_new_tokens": room if max_tokens is None else max_tokens,
        "min_new_tokens": body.min_tokens or 0,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": body.ignore_eos,
        "include_stop": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "logprobs": logprobs,
        "grammar": grammar,
        "speculate": body.speculate,
        "scheduler": body.scheduler,
    }
    return SamplingParams(**fields)


def _biases(given: dict[str, float]) -> dict[int, float]:
    strange = [key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 10)]
    if strange:
        raise bad_request(f"logit_bias: {strange[0]!r} is not a token id.", "logit_bias")
    return {int(key): bias for key, bias in given.items()}


def grammar_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Grammar | None:
    """What the text must match, if anything."""
    if structured is not None:
        return _structured(structured)
    if response_format is None or response_format.type == "text":
        return None
    schema = response_format.json_schema
    return json_grammar(ANY_OBJECT if schema is None or schema.schema_ is None else schema.schema_)


def json_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of a JSON schema whose answers do end: targets that are unsure write white space
    for ever where any amount of it is allowed."""
    hints = {"whitespace_pattern": WHITE_SPACE}
    return Grammar("json", json.dumps({"x-guidance": hints, **schema}))


def _structured(asked: StructuredOutputs) -> Grammar:
    if asked.json_ is not None:
        return json_grammar(_schema(asked.json_))
    if asked.json_object:
        return json_grammar(ANY_OBJECT)
    if asked.regex is not None:
        return Grammar("regex", asked.regex)
    if asked.choice is not None:
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in asked.choice)
        return Grammar("lark", f"start: {words}")
    assert asked.grammar is not None
    return Grammar("lark", asked.grammar)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_request("structured_outputs.json is not a JSON schema.", "structured_outputs")
    return found
