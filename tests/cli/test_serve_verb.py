"""``dspark serve`` itself: plan, banner, refusals, and a real process that drains on SIGTERM."""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from safetensors.torch import load_file, save_file

from dspark import Engine
from dspark.cli.banner import show_probe
from dspark.cli.console import Screen
from dspark.cli.embedded import probe
from dspark.cli.main import entry
from dspark.cli.serve import served_draft
from dspark.cli.serve_options import ServeOptions
from dspark.cli.speculation import engine_options, read_speculation
from server.process import Process

LIMITS = ("--max-model-len", "256", "--max-num-seqs", "4")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        entry(["serve", *arguments])
    return int(left.value.code or 0)


def words(pair: tuple[Path, Path], *more: str) -> list[str]:
    target, draft = pair
    return [str(draft), "--target", str(target), *more]


@pytest.fixture(scope="module")
def process(made_pair: tuple[Path, Path]) -> Iterator[Process]:
    config = json.dumps({"num_speculative_tokens": 4, "rejection_sample_method": "standard",
                         "attention_backend": "FLASHINFER_MLA", "method": "dspark"})  # fmt: skip
    started = Process(*words(made_pair, "--port", "0", "--served-model-name", "made",
                             "--speculative-config", config, *LIMITS))  # fmt: skip
    yield started
    if started.child.poll() is None:
        started.child.kill()


def test_the_banner_says_what_was_detected_and_what_is_not_used(process: Process) -> None:
    for expected in (
        "4 layers, float32 on cpu", "k3, 1 layers, block 7", "[0, 1], residual after each",
        "standard verification, probabilistic drafts of 4 tokens", "continuous, 4 answers",
        "calibration", "cost table", "context 256", "needed", "prefix cache on",
        "attention_backend: this engine has one attention", "trained with 7", "acceptance length",
        "nothing to compare with",
    ):  # fmt: skip
        assert expected in process.told, f"{expected!r} is not in:\n{process.told}"


def test_a_server_that_is_ready_has_counted_nothing_of_its_probe(process: Process) -> None:
    assert "probe" in process.told
    headers = {"Authorization": "Bearer from-the-environment"}
    stats = httpx2.get(f"{process.base}/debug/mtp_stats", headers=headers).json()
    assert stats["enabled"]
    for name in ("total_draft_tokens", "total_accepted_tokens", "total_steps"):
        assert stats[name] == 0, name
    page = httpx2.get(f"{process.base}/metrics", headers=headers).text
    counted = [
        sample
        for family in text_string_to_metric_families(page)
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    assert len(counted) > 10
    assert [sample.name for sample in counted if sample.value] == []


def test_options_reach_the_engine(process: Process) -> None:
    (model,) = process.client.models.list()
    assert (model.id, model.max_model_len) == ("made", 256)
    done = process.client.chat.completions.create(
        model="made", messages=[{"role": "user", "content": "x"}], max_tokens=60,
        extra_body={"return_acceptance": True},
    )  # fmt: skip
    slots = done.dspark["acceptance"]["admitted_per_position"]
    assert slots[3] > 0
    assert slots[4:] == [0, 0, 0]
    assert httpx2.get(f"{process.base}/v1/models").status_code == 401


def test_sigterm_lets_what_was_begun_end_and_nothing_new_begin(process: Process) -> None:
    """Last of its process."""
    asked = {"model": "made", "messages": [{"role": "user", "content": "long"}], "temperature": 0,
             "max_tokens": 200, "extra_body": {"ignore_eos": True, "speculate": False}}  # fmt: skip
    whole = process.client.chat.completions.create(**asked).choices[0]
    stream = iter(process.client.chat.completions.create(stream=True, **asked))
    text = next(stream).choices[0].delta.content or ""
    process.child.send_signal(signal.SIGTERM)
    refused = False
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        last = chunk.choices[0].finish_reason
        if not refused:
            try:
                httpx2.get(f"{process.base}/health", timeout=5)
            except httpx2.TransportError:
                refused = True
    assert (text, last) == (whole.message.content, "length")
    assert refused, "the port was closed while the answer was still being made"
    assert process.child.wait(20) == 0


def test_the_plan_prints_memory_and_capacity_and_loads_nothing(
    made_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words(made_pair, "--plan", "--json", "--cache-gib", "0.001", *LIMITS)) == 0
    plan = json.loads(capsys.readouterr().out)
    # 4 layers of 2 heads of keys and values of 16, and one draft layer of 24, in float32.
    assert plan["per_token"] == (4 * 2 * 2 * 16 + 24) * 4
    assert plan["pages"] == int(0.001 * 2**30) // (16 * plan["per_token"])
    assert plan["tokens"] == plan["pages"] * 16
    assert plan["whole"] == plan["tokens"] // 256
    assert plan["memory"] > plan["target"] + plan["draft"] + plan["cache"]
    assert run(*words(made_pair, "--plan", *LIMITS)) == 0
    out = capsys.readouterr().out
    assert "nothing was run" in out
    assert "context" in out
    assert run(*words(made_pair, "--plan", "--max-model-len", "9999")) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--max-model-len" in told
    assert "max_context" not in told, "a recipe's key, and there is no recipe"
    assert run(*words(made_pair, "--max-model-len", "9999", "--port", "0")) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "Set --max-model-len to" in told
    assert "max_context" not in told


@pytest.mark.parametrize(
    ("config", "option", "scheduler"),
    [
        (None, None, "fixed"),
        ('{"enable_adaptive_verification": true}', None, "sync"),
        ('{"enable_adaptive_verification": true}', "async", "async"),
        (None, "threshold", "threshold"),
    ],
)
def test_adaptive_verification_is_algorithm_1_and_the_servers_own_option_wins(
    made_pair: tuple[Path, Path], config: str | None, option: str | None, scheduler: str
) -> None:
    found = read_speculation(served_draft(made_pair[1]), config)
    options = ServeOptions(made_pair[1], max_num_seqs=4, scheduler=option)
    assert engine_options(options, 7, found).scheduler == scheduler


@pytest.mark.parametrize(
    ("words_", "says"),
    [
        (["--offload-disk", "1"], "--offload-path together"),
        (["--offload-path", "pages"], "--offload-path together"),
        (["--offload-fp8"], "Add --offload-memory"),
        (["--role", "decode"], "--peer tcp://PREFILL"),
        (["--role", "decode", "--peer", "10.0.0.5:5700"], "tcp://HOST:PORT"),
    ],
)
def test_offload_and_roles_that_do_not_go_together_are_refused(
    made_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], words_: list[str], says: str
) -> None:
    assert run(*words(made_pair, *words_, "--port", "0")) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_role_brings_room_for_pages_in_flight(made_pair: tuple[Path, Path]) -> None:
    found = read_speculation(served_draft(made_pair[1]), None)
    options = ServeOptions(made_pair[1], role="decode", peer="tcp://127.0.0.1:5700")
    assert engine_options(options, 7, found).offload_host_gib == 1
    told = ServeOptions(made_pair[1], role="decode", peer=options.peer, offload_memory=0.25)
    assert engine_options(told, 7, found).offload_host_gib == 0.25
    assert engine_options(ServeOptions(made_pair[1]), 7, found).offload_host_gib == 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "JSON object"),
        ('{"nonsense": 1}', "nonsense"),
        ('{"method": "eagle"}', "method"),
        ('{"num_speculative_tokens": 9}', "7, the block"),
        ('{"rejection_sample_method": "synthetic"}', "standard or block"),
        ('{"draft_sample_method": "other"}', "greedy, probabilistic"),
    ],
)
def test_a_speculative_config_that_cannot_be_followed_is_refused(
    made_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], config: str, says: str
) -> None:
    assert run(*words(made_pair, "--plan", "--speculative-config", config)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_taken_port_and_misplaced_arguments_are_told_before_loading(
    made_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        link.listen()
        port = str(link.getsockname()[1])
        assert run(*words(made_pair, "--port", port)) == 2
    assert "name another port" in " ".join(capsys.readouterr().err.split())
    assert run(*words(made_pair, "--", "--tensor-parallel-size", "8")) == 2
    assert "vllm or atom" in capsys.readouterr().err


def test_a_draft_that_drafts_rubbish_is_shown_in_a_box(
    made_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, folder = made_pair
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    name = "markov_head.markov_w2.weight"
    weights[name] = torch.randn_like(weights[name])
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    boxes = []
    for draft in (folder, broken):
        raw = json.loads((draft / "config.json").read_text())
        check = probe(
            Engine(str(target), draft, device="cpu"), draft, raw, Screen(Console(quiet=True))
        )
        seen = io.StringIO()
        show_probe(check, Console(file=seen, width=120))
        boxes.append((check.status, seen.getvalue()))
    assert boxes[0][0] == "warn", "it drafts, with nothing to compare with"
    status, text = boxes[1]
    assert status == "fail"
    assert "the draft does not draft as it should" in text
    assert "nothing is accepted" in text
    assert "─" in text
