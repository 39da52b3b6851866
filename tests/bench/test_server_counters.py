"""Counters of servers: read under their real names, subtracted, and not believed too easily."""

from __future__ import annotations

import json

import pytest

from dspark.bench.play.counters import (
    difference,
    foreign_traffic,
    parse_metrics,
    parse_mtp_stats,
)
from dspark.bench.play.turn import Accepted, Counters

# As a vLLM server writes it (shortened).
VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 70.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 21.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 34.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="other"} 999.0
"""


def test_vllms_counters_are_read_for_one_model() -> None:
    found = parse_metrics(VLLM, "m")
    assert found is not None
    assert (found.accepted.steps, found.accepted.drafted, found.accepted.accepted) == (10, 70, 21)
    assert found.accepted.accepted_at == (9, 8, 4)
    assert (found.requests, found.tokens, found.running) == (3, 34, 0)
    assert found.accepted.admitted is None


def test_our_servers_three_counts_are_kept_apart() -> None:
    text = VLLM + (
        'dspark:drafted_tokens_total{engine="0",model_name="m"} 70\n'
        'dspark:admitted_tokens_total{engine="0",model_name="m"} 40\n'
        'dspark:admitted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10\n'
        'dspark:admitted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 10\n'
    ).replace("vllm:spec_decode_num_draft_tokens_total", "x")
    found = parse_metrics(text, "m")
    assert found is not None
    assert (found.accepted.drafted, found.accepted.admitted) == (70, 40)
    assert found.accepted.admitted_at == (10, 10)


def test_a_page_without_speculation_has_no_counters() -> None:
    assert parse_metrics('vllm:generation_tokens_total{model_name="m"} 3\n') is None
    assert parse_metrics("<html>not a page of metrics</html>") is None


ATOM = {
    "enabled": True,
    "total_draft_tokens": 1400000,
    "total_accepted_tokens": 553980,
    "acceptance_rate": 0.3957,
    "average_tokens_per_forward": 3.7699,
    "distribution": {"2": 46020, "3": 153980},
}


def test_atoms_statistics_give_steps_and_slots() -> None:
    found = parse_mtp_stats(json.dumps(ATOM))
    assert found is not None
    assert found.source == "atom-counters"
    assert 1 + found.accepted.accepted / found.accepted.steps == pytest.approx(3.7699, abs=1e-4)
    assert found.accepted.accepted_at == (200000, 200000, 153980)


@pytest.mark.parametrize("text", ["", "[]", '{"enabled": false}', '{"enabled": true}', "not json"])
def test_statistics_that_are_off_or_strange_are_none(text: str) -> None:
    assert parse_mtp_stats(text) is None


def moved(steps: int, accepted: int, **other: int | None) -> Counters:
    counts = Accepted(steps=steps, drafted=7 * steps, accepted=accepted)
    return Counters(source="vllm-counters", accepted=counts, **other)


def test_a_difference_is_what_happened_between() -> None:
    before = parse_metrics(VLLM, "m")
    after = parse_metrics(VLLM.replace("} 10.0", "} 14.0").replace("} 70.0", "} 98.0").replace("} 21.0", "} 24.0")
                          .replace("} 9.0", "} 12.0"), "m")  # fmt: skip
    assert before is not None
    assert after is not None
    found = difference(before, after)
    assert found is not None
    assert (found.accepted.steps, found.accepted.accepted) == (4, 3)
    assert found.accepted.accepted_at == (3, 0, 0)
    assert difference(after, before) is None, "a counter that went down was reset"


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        (moved(10, 5, requests=3, tokens=17, running=0), "finished 3 requests"),
        (moved(10, 5, requests=2, tokens=99, running=0), "generated 99 tokens"),
        (moved(10, 5, requests=2, tokens=17, running=1), "still running"),
        (moved(80, 5), "make 87 tokens"),
    ],
)
def test_traffic_of_others_is_noticed(counters: Counters, why: str) -> None:
    told = foreign_traffic(counters, answers=2, tokens=17, block=7)
    assert told is not None
    assert why in told


def test_our_own_traffic_is_believed_with_what_lies_behind_the_end() -> None:
    assert foreign_traffic(moved(10, 5, requests=2, tokens=17, running=0), 2, 17, 7) is None
    assert foreign_traffic(moved(10, 12), 2, 17, 7) is None


def test_a_reading_in_the_middle_of_a_step_is_not_believed() -> None:
    before, after = moved(10, 5), moved(10, 9)
    assert difference(before, after) is None
