"""Many clients of one server, in a process of their own: ``load_client.py JSON``.

The JSON object holds ``base``, ``model``, ``requests`` (bodies of chat requests), ``clients`` at
once. Prints one JSON object: seconds of the whole, generated tokens, and per streamed request the
time to the first piece and the time per token after it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx2


async def one(http: httpx2.AsyncClient, body: dict[str, Any], out: dict[str, Any]) -> None:
    start = time.perf_counter()
    if not body.get("stream"):
        done = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        out["tokens"] += done["usage"]["completion_tokens"]
        out["whole"].append(time.perf_counter() - start)
        return
    first = last = 0.0
    early = count = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            if chunk["choices"]:
                last = time.perf_counter()
                if not first:
                    first, early = last, len(chunk["choices"][0]["token_ids"])
                count += len(chunk["choices"][0]["token_ids"])
    out["tokens"] += count
    out["first"].append(first - start)
    out["each"].append((last - first) / max(1, count - early))
    out["whole"].append(last - start)


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"tokens": 0, "first": [], "each": [], "whole": []}
    waiting = list(reversed(asked["requests"]))
    async with httpx2.AsyncClient(base_url=asked["base"], timeout=600) as http:

        async def client() -> None:
            while waiting:
                await one(http, waiting.pop(), out)

        await http.get("/health")
        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(asked["clients"])))
        out["seconds"] = time.perf_counter() - start
    return out


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
