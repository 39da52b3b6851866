"""A server under load in a process of its own, and its memory: ``load_memory.py TARGET DRAFT``.

Prints one JSON object: ``memory``, a list of bytes after each :data:`BURST` of requests.

``ONEDNN_PRIMITIVE_CACHE_CAPACITY=0`` belongs into its environment. torch's oneDNN keeps the machine
code that it makes for every new shape (rows of a step by size of a weight), 1,024 shapes at most
and 0.2 to 0.3 MiB each: nothing of ours, and thousands of requests pass before that cache is full.
The library reads the variable once, so it cannot be emptied in a process that has already computed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from resident import resident  # noqa: E402
from server.load import load  # noqa: E402
from server.serving import MODEL, make_engine, serving  # noqa: E402

REQUESTS, BURST = 5000, 500


def request(number: int, rng: random.Random) -> dict[str, Any]:
    """A chat request's body, of a kind that goes by its number."""
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": rng.choice((1, 4, 12)), "seed": number, "temperature": number % 2,
        "stream": bool(number % 3), "return_token_ids": True, "n": rng.choice((1, 1, 2)),
    }  # fmt: skip
    if number % 5 == 0:
        schema = {"type": "integer", "minimum": number}
        body["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}
        }  # fmt: skip
    if number % 7 == 0:
        body |= {"logprobs": True, "top_logprobs": 3, "stop": ["e"]}
    return body


def held() -> int:
    """Bytes of this process in memory, without what is free and only kept by the allocator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def run(pair: tuple[Path, Path]) -> list[int]:
    """Bytes after each burst."""
    rng, memory = random.Random(0), []
    with serving(make_engine(pair, cache_gib=0.005)) as served:
        for start in range(0, REQUESTS, BURST):
            load(served, [request(i, rng) for i in range(start, start + BURST)], clients=16)
            served.idle()
            memory.append(held())
    return memory


if __name__ == "__main__":
    print(json.dumps({"memory": run((Path(sys.argv[1]), Path(sys.argv[2])))}))
