"""What answers add up to: definitions, intervals over prompts, and what is not claimed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.suite_answers import answer, arm, counts, figures, results, turn
from dspark.bench.figures.acceptance import Counted, add_up, ratios, sum_of
from dspark.bench.figures.arm import bucket
from dspark.bench.figures.leaderboard import render_leaderboard
from dspark.bench.figures.page import render_suite
from dspark.bench.figures.tables import card_rows, detail_rows, markdown
from dspark.bench.play.turn import Accepted, Counters


def test_lengths_are_pooled_over_steps_and_averaged_over_prompts() -> None:
    parts = [Counted("a", counts([3, 3])), Counted("b", counts([0, 0, 0, 0, 0, 0]))]
    found = add_up(parts, seed=0)
    assert found is not None
    assert found.length == 1 + 6 / 8
    assert found.length_per_prompt == (4 + 1) / 2
    assert found.rate_drafted == found.rate_admitted == 6 / 24


def test_turns_of_one_prompt_are_one_prompt_of_the_interval() -> None:
    parts = [Counted("a", counts([3])), Counted("a", counts([0]))]
    found = add_up(parts, seed=0)
    assert found is not None
    assert found.prompts == 1
    assert found.interval is None


def test_slots_are_unconditional_and_conditional() -> None:
    found = ratios(counts([3, 1, 0, 2]), prompts=1)
    assert found.unconditional == (3 / 4, 2 / 4, 1 / 4)
    assert found.conditional == (3 / 4, 2 / 3, 1 / 2)


def test_conditional_rates_are_not_claimed_where_a_scheduler_cut_blocks() -> None:
    cut = Accepted(
        steps=4, drafted=12, admitted=8, accepted=3, accepted_at=(2, 1, 0), admitted_at=(4, 3, 1)
    )
    assert ratios(cut, prompts=1).conditional == (2 / 4, None, None)
    assert ratios(cut, prompts=1).rate_admitted == 3 / 8
    short = Accepted(steps=4, drafted=8, accepted=3, accepted_at=(2, 1, 0))
    assert ratios(short, prompts=1).conditional is None


def test_tokens_per_forward_counts_forwards_without_a_draft_too() -> None:
    # 1 token of the prompt, 2 steps with 3 accepted in all, 5 forwards that drafted nothing.
    made = Counted("a", counts([2, 1]), tokens=1 + 5 + 5)
    found = add_up([made], seed=0)
    assert found is not None
    assert found.length == 2.5
    assert found.tokens_per_forward == 10 / 7


def test_an_answer_that_ends_in_an_accepted_run_has_no_forward_less() -> None:
    found = add_up([Counted("a", counts([3, 3]), tokens=1 + 4 + 3)], seed=0)
    assert found is not None
    assert found.tokens_per_forward == 7 / 2


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=6))
def test_the_interval_holds_the_figure_and_slots_sum_to_it(steps: list[list[int]]) -> None:
    parts = [Counted(str(i), counts(own)) for i, own in enumerate(steps)]
    found = add_up(parts, seed=1)
    assert found is not None
    assert found.length is not None
    assert found.interval is not None
    assert found.unconditional is not None
    lengths = [1 + sum(own) / len(own) for own in steps]
    assert min(lengths) - 1e-9 <= found.interval[0] <= found.interval[1] <= max(lengths) + 1e-9
    assert math.isclose(1 + sum(found.unconditional), found.length)
    assert list(found.unconditional) == sorted(found.unconditional, reverse=True)


def test_a_count_that_one_part_does_not_tell_is_not_told_of_the_whole() -> None:
    silent = Accepted(steps=1, drafted=3, accepted=1)
    total = sum_of([counts([2]), silent])
    assert (total.accepted, total.admitted, total.accepted_at) == (3, None, None)


def test_an_arm_shows_categories_turns_contexts_and_positions() -> None:
    turns = [
        turn("a", answer([3, 3], prompt_tokens=100)),
        turn("a", answer([1], prompt_tokens=5000), turn=1),
        turn("b", answer([0] * 40, prompt_tokens=2000), category="math"),
    ]
    found = figures(turns)
    assert found.asked == 2
    assert found.turns == 3
    assert found.by_category["writing"].length == 1 + 7 / 3
    assert found.by_category["math"].length == 1
    assert set(found.by_turn) == {"turn 1", "turn 2"}
    assert list(found.by_context) == ["0-1023", "1024-4095", "4096-16383"]
    assert found.by_position["0-31"].steps == 3 + 31
    assert found.by_position["32-127"].length == 1


def test_speed_is_wall_time_ttft_and_tpot() -> None:
    found = figures([turn("a", answer([3, 3])), turn("b", answer([3, 3]))])
    assert found.speed is not None
    assert found.speed.tokens_per_second == 18 / 10
    assert found.speed.first is not None
    assert found.speed.first.p50 == 0.5
    assert found.speed.each is not None
    assert found.speed.each.mean == pytest.approx(1 / 8)


def test_failures_timeouts_and_cut_answers_are_counted_and_told() -> None:
    turns = [
        turn("a", answer([1], finish="length")),
        turn("b", None),
        turn("c", None, timed_out=True),
    ]
    found = figures(turns)
    assert (found.failed, found.timed_out, found.truncated) == (2, 1, 1)
    assert any("2 of 3 turns failed (1 by timeout)" in text for text in found.notices)
    assert any("cut at the limit" in text for text in found.notices)


def test_zero_drafts_and_silent_servers_are_said_plainly() -> None:
    plain = figures([turn("a", answer([], source="engine"))])
    assert plain.acceptance is not None
    assert plain.acceptance.length is None
    assert "Nothing was drafted: this is plain decoding." in plain.notices
    silent = figures([turn("a", answer(None))])
    assert silent.acceptance is None
    assert any("tells nothing about drafting" in text for text in silent.notices)


def test_acceptance_told_by_some_answers_only_is_no_figure() -> None:
    found = figures([turn("a", answer([1])), turn("b", answer(None))])
    assert found.acceptance is None
    assert any("Only 1 of 2 answers" in text for text in found.notices)


def totals(steps: int, accepted: int, requests: int, tokens: int) -> Counters:
    return Counters(
        source="vllm-counters",
        accepted=Accepted(steps=steps, drafted=3 * steps, accepted=accepted),
        requests=requests,
        tokens=tokens,
        running=0,
    )


def test_counters_around_an_arm_give_a_figure_without_an_interval() -> None:
    turns = [turn("a", answer(None, tokens=10)), turn("b", answer(None, tokens=10))]
    found = figures(turns, before=totals(5, 5, 1, 100), after=totals(15, 15, 3, 120))
    assert found.source == "vllm-counters"
    assert found.acceptance is not None
    assert (found.acceptance.length, found.acceptance.interval) == (2.0, None)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (totals(15, 15, 4, 120), "3 requests, 2 were ours"),
        (totals(15, 15, 3, 200), "100 tokens, 20 were ours"),
        (totals(3, 3, 3, 120), "were reset or contradict"),
    ],
)
def test_counters_of_others_or_reset_ones_give_no_figure(after: Counters, told: str) -> None:
    turns = [turn("a", answer(None, tokens=10)), turn("b", answer(None, tokens=10))]
    found = figures(turns, before=totals(5, 5, 1, 100), after=after)
    assert found.acceptance is None
    assert any(told in text for text in found.notices)


def test_an_arm_taken_up_again_gives_no_speed() -> None:
    assert figures([turn("a", answer([1]))], resumed=1).speed is None


@pytest.mark.parametrize(
    ("value", "name"), [(0, "0-31"), (31, "0-31"), (32, "32-127"), (9e9, "2048+")]
)
def test_buckets_are_half_open(value: int, name: str) -> None:
    assert bucket(int(value), (32, 128, 512, 2048)) == name


def both_temperatures() -> tuple[object, ...]:
    cold = [turn(n, answer([3, 3])) for n in "ab"]
    warm = [turn(n, answer([1, 1]), temperature=1.0) for n in "ab"]
    return figures(cold), figures(warm, 1.0)


def test_the_table_has_the_cards_columns_and_marks_a_shortened_benchmark() -> None:
    own = results("draft", *both_temperatures(), missing={"aa_lcr": "no data"})
    header, rows = card_rows(own)
    assert header == ["benchmark", "T=0 (95 %)", "T=1 (95 %)", "prompts"]
    assert rows[0] == ["MT-Bench", "4.00 (4.00 to 4.00)", "2.00 (2.00 to 2.00)", "2 of 80"]
    assert rows[-1] == ["aa_lcr", "not run", "not run", "-"]
    assert len(detail_rows(own)[1]) == 2
    assert markdown(["a|b"], [["c"]]) == "| a\\|b |\n|---|\n| c |\n"


def test_page_and_leaderboard_hold_what_was_measured_and_escape_it() -> None:
    own = results("<b>draft</b>", *both_temperatures(), missing={"aa_lcr": "no data"})
    page = render_suite(own)
    assert "<b>draft" not in page
    assert "4.00 (4.00 to 4.00)" in page
    assert "<svg" in page
    board = render_leaderboard({"one.json": own})
    assert "| MT-Bench | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | 2 of 80 |" in board
    assert "benchmarks/results/one.json" in board
    assert "Nothing has been measured" in render_leaderboard({})


def test_counts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="accepted 4 of drafted 3"):
        Accepted(steps=1, drafted=3, accepted=4)
    with pytest.raises(ValueError, match="sums to 2"):
        Accepted(steps=1, drafted=3, accepted=3, accepted_at=(1, 1, 0))
    assert arm([]).asked == 0
