"""Figures that others scrape: vLLM's names, ATOM's fields, and sums that agree with the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from server.serving import MODEL, Served, make_engine, serving

ROOT = Path(__file__).parents[2]
VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
    "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens",
    "request_success", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens",
}  # fmt: skip
ATOM = {
    "enabled", "total_draft_tokens", "total_accepted_tokens", "acceptance_rate",
    "average_tokens_per_forward", "distribution", "distribution_percent",
}  # fmt: skip


def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Value by sample name and position."""
    with served.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, sample.labels.get("position", "")): sample.value
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
    assert value("vllm:time_to_first_token_seconds_count") == 4
    assert value("vllm:e2e_request_latency_seconds_count") == 4
    assert value("vllm:request_generation_tokens_sum") == generated
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0

    assert set(stats) >= ATOM
    assert stats["total_accepted_tokens"] == accepted
    assert stats["total_draft_tokens"] == drafted
    assert sum(stats["distribution"].values()) == steps
    assert sum(int(k) * v for k, v in stats["distribution"].items()) == accepted
    assert stats["average_tokens_per_forward"] == 1 + accepted / steps
    assert abs(sum(stats["distribution_percent"].values()) - 1) < 1e-9


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
