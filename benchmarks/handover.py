"""What a prompt really moves from prefill to decode, in bytes on the network interface.

At Kimi-K3's widths with made rows: pages of 24 latent layers of the target and 5 of the draft (576
numbers a row) in the format of ``dspark.engine.pagefile``, against the five tapped hidden states
(7168 numbers each) that the draft's rows are made from; all of it over the ZeroMQ sockets and the
transport that the servers use, on loopback, counted by the kernel. With ``--draft`` also a whole
prefill server and a decoding one around that draft and its target.

    python benchmarks/handover.py --draft runs/tiny-k3
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

import torch
import zmq

from dspark.api import Engine
from dspark.cli.origin import origin_of
from dspark.cli.places import draft_folder
from dspark.config.engine import EngineOptions
from dspark.decoding.params import SamplingParams
from dspark.engine.handover import DecodeNode, PageLink, PrefillNode
from dspark.engine.offload import page_layout
from dspark.engine.pagefile import StoredPage, encode_page
from dspark.hidden.codec import Part
from dspark.hidden.mail import Postman, pack, unpack
from dspark.hidden.transport import open_transport
from dspark.model.paged import PagedRows

LAYERS, DRAFT_LAYERS, WIDTH, HIDDEN, PAGE = 24, 5, 576, 7168, 64
TOKENS = 1024
FORMS = {"bfloat16": False, "fp8": True}


class Sink(Postman):
    """Counts the messages that come."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("sink")
        self.bodies = 0
        self.messages = 0
        self.add_socket(zmq.PULL).bind(endpoint)
        self.start()

    def received(self, socket: int, frames: list[Part]) -> None:
        _, parts = unpack(frames)
        self.bodies += sum(memoryview(part).nbytes for part in parts)
        self.messages += 1

    def tick(self) -> None:
        """Nothing is due."""


class Source(Postman):
    """Sends bodies."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("source")
        self.add_socket(zmq.PUSH).connect(endpoint)
        self.start()

    def received(self, socket: int, frames: list[Part]) -> None:
        """Nobody answers."""

    def tick(self) -> None:
        """Nothing is due."""


def on_the_wire() -> int:
    """Bytes that the loopback interface has sent, headers of all layers included."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("no loopback interface in /proc/net/dev")


def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def sent(bodies: list[bytes]) -> dict[str, float]:
    """Bodies through the sockets: their bytes and those of the interface, a token of ``TOKENS``."""
    place, transport = endpoint(), open_transport("tcp", "benchmark")
    sink, source = Sink(place), Source(place)
    try:
        time.sleep(0.5)  # connected
        before = on_the_wire()
        for number, body in enumerate(bodies):
            head = {"type": "page", "name": str(number)}
            source.post(0, pack(head, transport.put(str(number), [body])))
        while sink.messages < len(bodies):
            time.sleep(0.01)
        moved = on_the_wire() - before
        assert sink.bodies == sum(map(len, bodies))
    finally:
        source.close()
        sink.close()
    return {"body": round(sink.bodies / TOKENS, 1), "wire": round(moved / TOKENS, 1)}


def pages(layers: int, first_draft: int, *, fp8: bool) -> list[bytes]:
    """Encoded pages of ``TOKENS`` made rows; draft layers begin at ``first_draft``."""
    parts = [[(1, WIDTH, torch.bfloat16)]] * layers
    rows = PagedRows(parts, 1, PAGE, torch.device("cpu"))
    layout = page_layout(rows, first_draft, fp8=fp8)
    generator = torch.Generator().manual_seed(0)
    out = []
    for number in range(TOKENS // PAGE):
        made = tuple(
            torch.randn(PAGE, 1, WIDTH, generator=generator).bfloat16() for _ in range(layers)
        )
        sound = (True,) * PAGE
        key = number.to_bytes(16, "little")
        out.append(encode_page(layout, bytes(16), key, StoredPage(sound, sound, made)))
    return out


def at_k3_widths() -> dict[str, Any]:
    """Bytes a token of target and draft, of the draft alone, and of the hidden states instead."""
    hidden = [
        torch.randn(PAGE, DRAFT_LAYERS, HIDDEN).bfloat16().view(torch.uint8).numpy().tobytes()
        for _ in range(TOKENS // PAGE)
    ]
    found: dict[str, Any] = {"five hidden states, bfloat16": sent(hidden)}
    states = found["five hidden states, bfloat16"]["wire"]
    for form, fp8 in FORMS.items():
        both = sent(pages(LAYERS + DRAFT_LAYERS, LAYERS, fp8=fp8))
        draft = sent(pages(DRAFT_LAYERS, 0, fp8=fp8))
        found[f"rows of target and draft, {form}"] = both
        found[f"rows of the draft alone, {form}"] = draft
        found[f"hidden states over the draft's rows, {form}"] = round(states / draft["wire"], 1)
    return found


def through_engines(folder: Path, tokens: int) -> dict[str, Any]:
    """A prompt through a prefill node and a decode node around real weights."""
    options = EngineOptions(offload_host_gib=0.5, max_requests=1)
    near, far = (Engine(None, folder, options=options, device="cpu") for _ in range(2))
    place = endpoint()
    node = PrefillNode(far.core, place, open_transport("tcp", "handover"))
    link = PageLink(place, open_transport("tcp", "handover"))
    decode = DecodeNode(near.core, link, patience=60)
    size, layout = near.core.pool.page_size, decode.offload.layout
    state = decode.offload.state_layout
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(8, 200, (tokens,), generator=generator).tolist()
    try:
        time.sleep(0.5)
        before = on_the_wire()
        name = decode.submit(prompt, SamplingParams(max_new_tokens=8))
        while decode.unfinished:
            node.work()
            decode.step()
        moved = on_the_wire() - before
        cached = decode.collect(name).cached_tokens
    finally:
        link.close()
        node.close()
    taps = near.core.target.layer_ids
    hidden = len(taps) * near.core.target.hidden_size * 4
    own = next(p for p in layout.parts if p.kind == "draft")
    drafted = sum(p.byte_count for p in layout.parts if p.kind == "draft") / size
    return {
        "prompt_tokens": tokens, "found_by_decode": cached, "pages": decode.counts.pages,
        "bytes_received": decode.counts.bytes, "wire_bytes": moved,
        "state_bytes": 0 if state is None else state.byte_count,
        "row_bytes_a_token": round(layout.bytes_per_token(), 1), "form": own.form,
        "draft_row_bytes_a_token": drafted, "hidden_state_bytes_a_token": hidden,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes from prefill to decode")
    parser.add_argument("--draft", type=Path, help="a draft or its run")
    parser.add_argument("--tokens", type=int, default=401, help="of the prompt")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/handover.json"))
    given = parser.parse_args()
    result: dict[str, Any] = {
        "what": f"bytes a token over {TOKENS} tokens in pages of {PAGE}: of the bodies, and of "
        "everything the loopback interface sent",
        **origin_of("python benchmarks/handover.py --draft runs/tiny-k3").model_dump(),
        "k3_widths": at_k3_widths(),
    }
    if given.draft is not None:
        result["engines"] = through_engines(draft_folder(given.draft), given.tokens)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: result[k] for k in ("k3_widths", "engines") if k in result}, indent=2))


if __name__ == "__main__":
    main()
