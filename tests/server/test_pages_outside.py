"""Real servers whose pages leave the cache: to host memory and disk, and from another machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from dspark import Engine
from dspark.cli.banner import facts
from dspark.cli.serve_options import ServeOptions
from dspark.cli.speculation import Speculation
from dspark.errors import ConfigError
from dspark.server.handover import DecodeRole, HandoverRole, PrefillRole
from server.process import Process
from server.serving import MODEL, Served, chat, make_engine, serving

LONG = [" ".join(f"{word} {i}" for i in range(14)) for word in ("apples", "pears", "plums", "figs")]
SMALL = 90 * 16  # tokens: one text and a half


def ask(base: str, text: str, **fields: object) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt were found."""
    client = OpenAI(base_url=f"{base}/v1", api_key="from-the-environment", max_retries=0)
    usual = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 24}
    found = client.chat.completions.create(messages=chat(text), **{**usual, **fields})
    return found.choices[0].message.content, found.usage.prompt_tokens_details.cached_tokens


def figures(base: str) -> dict[str, float]:
    """dspark's own figures by name and label."""
    out = {}
    for family in text_string_to_metric_families(httpx2.get(f"{base}/metrics").text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k in {"place", "pages"}]
            out["/".join([sample.name.removesuffix("_total"), *labels])] = sample.value
    return out


def small_engine(pair: tuple[Path, Path], **options: object) -> Engine:
    """Room for about one and a half of the texts above, so that each drives another out."""
    made = make_engine(pair, max_requests=1, page_size=16, **options)
    width = made.core.runner.rows.layers
    per_token = sum(rows[0].numel() * 4 for parts in width for rows in parts)
    return make_engine(
        pair, max_requests=1, cache_gib=24 * 16 * per_token / 2**30, page_size=16, **options
    )


def test_pages_of_a_server_come_back_from_host_memory_and_disk(made_pair, tmp_path) -> None:
    cold = []
    with serving(small_engine(made_pair)) as served:
        cold = [ask(served.base, text)[0] for text in LONG]
        again = ask(served.base, LONG[0])
        assert again == (cold[0], again[1])
        assert again[1] < 64, "driven out"
        assert not [name for name in figures(served.base) if "offload" in name]
    places = {
        "host": {"offload_host_gib": 0.5},
        "disk": {"offload_disk_gib": 0.5, "offload_path": str(tmp_path / "pages")},
    }
    for place, options in places.items():
        with serving(small_engine(made_pair, **options)) as served:
            for text, want in zip(LONG * 2, cold * 2, strict=True):
                answer, cached = ask(served.base, text)
                assert answer == want
            assert cached >= 96
            found = figures(served.base)
        assert found["dspark:offload_saved"] > 10
        assert found[f"dspark:offload_hits/{place}"] > 10
        assert found["dspark:offload_restored"] > 10
        assert found["dspark:offload_queries"] > found[f"dspark:offload_hits/{place}"]
        assert found[f"dspark:offload_bytes/{place}"] > 10_000
        assert found["dspark:offload_refused"] == found["dspark:offload_evicted"] == 0
    for path in (tmp_path / "pages").glob("*.dspage"):
        path.write_bytes(path.read_bytes()[:-5] + b"spoil")
    with serving(small_engine(made_pair, **places["disk"])) as served:
        assert ask(served.base, LONG[0])[0] == cold[0]
        assert figures(served.base)["dspark:offload_refused"] >= 1


def test_a_store_that_is_full_says_what_it_gave_up(made_pair) -> None:
    with serving(small_engine(made_pair, offload_host_gib=1e-4)) as served:
        for text in LONG:
            ask(served.base, text)
        assert figures(served.base)["dspark:offload_evicted"] > 0


def test_pages_of_a_retrained_draft_in_the_same_folder_are_not_found(made_pair, tmp_path) -> None:
    target, draft = made_pair
    own = tmp_path / "draft"
    shutil.copytree(draft, own)
    options = {"offload_disk_gib": 0.5, "offload_path": str(tmp_path / "pages")}
    pair, hits = (target, own), []
    for _ in range(2):
        with serving(small_engine(pair, **options)) as served:
            for text in LONG:
                ask(served.base, text)
            hits.append(figures(served.base)["dspark:offload_hits/disk"])
        weights = load_file(own / "model.safetensors")
        name = "layers.0.self_attn.kv_a_proj_with_mqa.weight"
        weights[name] = torch.randn_like(weights[name])
        save_file(weights, own / "model.safetensors", {"format": "pt"})
    assert hits == [0, 0]


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def split(pair: tuple[Path, Path]) -> Iterator[tuple[Served, Served]]:
    """A prefill and a decode server in this process."""
    endpoint = free_endpoint()
    engines = [make_engine(pair, offload_host_gib=0.2, page_size=16) for _ in range(2)]
    roles: list[HandoverRole] = [PrefillRole(engines[0], endpoint)]
    roles.append(DecodeRole(engines[1], endpoint, 20))
    with (
        serving(engines[0], role=roles[0]) as prefill,
        serving(engines[1], role=roles[1]) as decode,
    ):
        yield prefill, decode


def test_prompts_are_prefilled_on_one_server_and_decoded_on_another(made_pair, served) -> None:
    want = [ask(served.base, text)[0] for text in LONG]
    with split(made_pair) as (prefill, decode):
        found: list[tuple[str, int]] = [("", 0)] * 4

        def run(number: int) -> None:
            found[number] = ask(decode.base, LONG[number])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [text for text, _ in found] == want
        assert all(cached >= 96 for _, cached in found)
        assert ask(prefill.base, LONG[0])[0] == want[0], "it answers, too"
        sent, came = figures(prefill.base), figures(decode.base)
    assert came["dspark:handover_prompts/in_time"] == 4
    assert came["dspark:handover_prompts/late"] == 0
    assert came["dspark:handover_peer_alive"] == 1
    assert sent["dspark:handover_prompts_sent"] == 4
    for what in ("pages", "bytes"):
        assert sent[f"dspark:handover_{what}_sent"] == came[f"dspark:handover_{what}_received"] > 20
    assert came["dspark:offload_hits/host"] >= 24


def test_a_prompt_that_nobody_can_serve_is_refused_by_the_server_that_was_asked(made_pair) -> None:
    with split(made_pair) as (_, decode), pytest.raises(Exception, match="maximum context"):
        ask(decode.base, "far too long " * 200)


def test_a_port_that_is_taken_is_told(made_pair) -> None:
    engine = make_engine(made_pair, offload_host_gib=0.2)
    endpoint = free_endpoint()
    first = PrefillRole(engine, endpoint)
    try:
        with pytest.raises(ConfigError, match="another port"):
            PrefillRole(engine, endpoint)
    finally:
        first.close()


def test_the_banner_says_where_pages_go(served: Served, made_pair, tmp_path: Path) -> None:
    from dspark.server.service import Service

    engine = make_engine(
        made_pair, offload_host_gib=0.5, offload_disk_gib=2, offload_path=str(tmp_path)
    )
    options = ServeOptions(made_pair[1], role="decode", peer="tcp://10.0.0.5:5700", patience=4)
    rows = dict(facts(options, Service(engine, MODEL), Speculation({}, (), ())))
    assert rows["offload"].startswith(f"0.5 GiB of host memory, then 2 GiB in {tmp_path}; ")
    assert rows["role"] == "decode: prompts are computed by tcp://10.0.0.5:5700, or here after 4 s"
    plain = dict(facts(ServeOptions(made_pair[1]), served.service, Speculation({}, (), ())))
    assert not {"offload", "role"} & set(plain)


@pytest.mark.slow
def test_either_server_killed_in_the_middle_loses_no_request(made_pair, served) -> None:
    """Prefill, then decode, killed with SIGKILL while four prompts move; a router holds them."""
    from server.test_route import routing

    target, draft = made_pair
    usual = [str(draft), "--target", str(target), "--port", "0", "--no-probe"]
    want = [ask(served.base, text, max_tokens=200)[0] for text in LONG]
    for victim in ("prefill", "decode"):
        endpoint = free_endpoint()
        prefill = Process(*usual, "--role", "prefill", "--peer", endpoint)
        decode = Process(*usual, "--role", "decode", "--peer", endpoint, "--patience", "5")
        found: list[str] = [""] * 4
        # The prefill server has the whole engine: it answers when no decode server is left.
        with routing(decode.base, prefill.base) as base:

            def run(number: int, base: str = base, into: list[str] = found) -> None:
                into[number] = ask(base, LONG[number], max_tokens=200)[0]

            threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            os.kill({"prefill": prefill, "decode": decode}[victim].child.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(120)
        for process in (prefill, decode):
            process.child.kill()
        assert found == want, victim
