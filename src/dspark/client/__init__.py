"""One async client for every OpenAI-compatible server: vLLM, SGLang, ATOM, our own.

Servers differ in small ways that cost people weeks: where the prompt's token ids stand in a reply,
whether reasoning is called ``reasoning`` or ``reasoning_content``, what a full queue answers. They
are told apart here and nowhere else. A server that is gone is tried again with patience and then
named; a reply that is no reply is never taken for an empty answer.
"""

from dspark.client.endpoint import Endpoint, Retry, Timeouts
from dspark.client.http import Client, ModelInfo
from dspark.client.reply import Choice, Chunk, Completion, TokenLogprob, Usage

__all__ = [
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Endpoint",
    "ModelInfo",
    "Retry",
    "Timeouts",
    "TokenLogprob",
    "Usage",
]
