"""Figures that others scrape: vLLM's names, ATOM's fields, and sums that agree with the answers."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.serving import CHAT, MODEL, Served, body, make_engine, serving

ROOT = Path(__file__).parents[2]
VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
    "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens",
    "request_success", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_prefill_kv_computed_tokens", "request_max_num_generation_tokens",
    "request_num_preemptions", "request_params_n", "request_params_max_tokens",
    "prompt_tokens_cached", "num_requests_waiting_by_reason", "cache_config_info",
}  # fmt: skip
PER_ANSWER = (
    "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_num_preemptions",
    "request_prefill_kv_computed_tokens", "request_params_max_tokens",
)  # fmt: skip
ATOM = {
    "enabled", "total_draft_tokens", "total_accepted_tokens", "acceptance_rate",
    "average_tokens_per_forward", "distribution", "distribution_percent",
}  # fmt: skip


def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Value by sample name, and by position or reason where there is one."""
    with served.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (
            sample.name,
            sample.labels.get("position", "") + sample.labels.get("finished_reason", ""),
        ): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if "le" not in sample.labels and sample.labels.get("model_name") == MODEL
    }


def test_names_are_vllms_and_sums_agree_with_the_answers(made_pair: tuple[Path, Path]) -> None:
    with serving(make_engine(made_pair)) as served:
        client = served.client
        prompt = generated = accepted = drafted = steps = 0
        for seed in range(4):
            done = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "count"}], seed=seed, n=2,
                max_tokens=40, extra_body={"return_acceptance": True},
            )  # fmt: skip
            prompt += done.usage.prompt_tokens
            generated += done.usage.completion_tokens
            found = done.dspark["acceptance"]
            accepted += found["accepted"]
            drafted += found["drafted"]
            steps += found["steps"]
        served.idle()
        found = scrape(served)
        with served.http() as http:
            text = http.get("/metrics").text
            stats = http.get("/debug/mtp_stats").json()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {f"vllm:{name}" for name in VLLM} <= names

    def value(name: str) -> float:
        return found[name, ""]

    assert value("vllm:prompt_tokens_total") == prompt
    assert value("vllm:generation_tokens_total") == generated
    assert value("vllm:spec_decode_num_drafts_total") == steps
    assert value("vllm:spec_decode_num_draft_tokens_total") == drafted
    assert value("vllm:spec_decode_num_accepted_tokens_total") == accepted
    slots = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(k)] for k in range(7)]
    assert sum(slots) == accepted
    assert slots == sorted(slots, reverse=True)
    assert value("dspark:drafted_tokens_total") >= value("dspark:admitted_tokens_total") >= accepted
    for name in PER_ANSWER:
        assert value(f"vllm:{name}_count") == 8, name
    assert value("vllm:request_params_n_count") == 4
    assert value("vllm:request_params_n_sum") == 8
    assert value("vllm:request_max_num_generation_tokens_count") == 4
    assert value("vllm:request_params_max_tokens_sum") == 8 * 40
    assert value("vllm:request_generation_tokens_sum") == generated
    assert value("vllm:request_prompt_tokens_sum") == 2 * prompt
    assert value("vllm:prefix_cache_queries_total") == prompt
    assert value("vllm:prefix_cache_hits_total") == value("vllm:prompt_tokens_cached_total")
    ended = {why: found["vllm:request_success_total", why] for why in ("stop", "length")}
    assert sum(ended.values()) == 8
    assert found["vllm:request_success_total", "abort"] == 0
    assert found["vllm:request_success_total", "error"] == 0
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0

    assert set(stats) >= ATOM
    assert stats["total_accepted_tokens"] == accepted
    assert stats["total_draft_tokens"] == drafted
    assert sum(stats["distribution"].values()) == steps
    assert sum(int(k) * v for k, v in stats["distribution"].items()) == accepted
    assert stats["average_tokens_per_forward"] == 1 + accepted / steps
    assert abs(sum(stats["distribution_percent"].values()) - 1) < 1e-9


def test_phases_of_an_answer_add_up_and_its_pieces_are_counted(
    made_pair: tuple[Path, Path],
) -> None:
    """Whole and streamed alike, though nobody reads the pieces of a whole answer."""
    with serving(make_engine(made_pair, max_requests=1)) as served:
        pieces = {}
        for stream in (False, True):
            before = scrape(served)
            asked = body(stream=stream, temperature=1, seed=3, max_tokens=60, ignore_eos=True,
                         return_token_kinds=True)  # fmt: skip
            with ThreadPoolExecutor(3) as clients, served.http() as http:
                answers = list(clients.map(lambda _: http.post(CHAT, json=asked), range(3)))  # noqa: B023
            served.idle()
            after = scrape(served)
            found = {key: after[key] - before.get(key, 0) for key in after}

            def total(name: str, kind: str = "sum") -> float:
                return found[f"vllm:{name}_{kind}", ""]  # noqa: B023

            pieces[stream] = total("inter_token_latency_seconds", "count")
            queued, prefill = (total(f"request_{p}_time_seconds") for p in ("queue", "prefill"))
            decode, running = (total(f"request_{p}_time_seconds") for p in ("decode", "inference"))
            assert abs(prefill + decode - running) < 1e-6
            assert total("inter_token_latency_seconds") == pytest.approx(decode)
            assert min(queued, prefill, decode) > 0
            # One after the other: the second waits for the first, the third for both.
            assert queued > decode / 2
            whole, first = (
                total("e2e_request_latency_seconds"),
                total("time_to_first_token_seconds"),
            )
            assert first >= queued + prefill
            assert whole >= queued + running
            assert whole - first == pytest.approx(decode)
            if stream:
                text = "".join(answer.text for answer in answers)
                assert text.count('"steps":[') == pieces[True] + 3
        assert pieces[True] == pieces[False]
        (config,) = [f for f in text_string_to_metric_families(served.http().get("/metrics").text)
                     if f.name == "vllm:cache_config_info"]  # fmt: skip
        (sample,) = config.samples
        pool = served.service.engine.core.pool
        assert sample.value == 1
        assert sample.labels["block_size"] == str(pool.page_size)
        assert sample.labels["num_gpu_blocks"] == str(pool.count)
        assert sample.labels["cache_dtype"] == "float32"


def test_without_a_draft_the_server_serves_and_says_so(made_pair: tuple[Path, Path]) -> None:
    with serving(make_engine(made_pair, draft=False), draft=None) as served, served.http() as http:
        done = served.client.completions.create(model=MODEL, prompt="x", max_tokens=5)
        assert done.usage.completion_tokens == 5
        assert http.get("/debug/mtp_stats").json()["enabled"] is False
        assert "spec_decode" not in http.get("/metrics").text
        assert "without a draft" in http.get("/").text


def test_the_dashboard_asks_only_for_what_is_there(served: Served) -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"\b(?:vllm|dspark):[a-z0-9_]+", target["expr"])
    }
    with served.http() as http:
        text = http.get("/metrics").text
    there = {s.name for f in text_string_to_metric_families(text) for s in f.samples}
    assert len(asked) > 10
    assert asked <= there, asked - there
