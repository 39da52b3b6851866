"""Comparisons: pairing, both averages, identity with positions, and verdicts that do not overclaim."""

from __future__ import annotations

import random

import pytest

from bench.suite_answers import answer, figures, results, turn
from dspark.bench.figures.identity import identity_of
from dspark.bench.figures.page import render_comparison
from dspark.bench.figures.pairs import compare_results, table_averages
from dspark.bench.figures.schema import SuiteResults
from dspark.bench.play.settings import SuiteSettings
from dspark.errors import DataError

CARD = [
    ("GSM8K", 3.96, 4.90),
    ("HumanEval", 3.45, 4.07),
    ("MT-Bench", 2.81, 3.10),
    ("AIME", 2.45, 2.76),
]
NAMES = ("A", "B")


def test_the_published_table_gives_both_averages() -> None:
    ratio, mean = table_averages(CARD)
    assert round(100 * ratio, 1) == 85.4
    assert round(100 * mean, 1) == 86.2


@pytest.mark.parametrize(
    "rows", [[], [("a", 2, 2), ("a", 3, 3)], [("a", 0.5, 2)], [("a", float("nan"), 2)]]
)
def test_a_table_that_cannot_be_is_refused(rows: list[tuple[str, float, float]]) -> None:
    with pytest.raises(DataError):
        table_averages(rows)


def suite(name: str, rows: list[list[int]], **other: object) -> SuiteResults:
    turns = [turn(str(i), answer(steps)) for i, steps in enumerate(rows)]
    return results(name, figures(turns), **other)


def noisy(shift: float, seed: int, prompts: int = 40) -> list[list[int]]:
    """Prompts differ much; ``shift`` of the steps accept one token more."""
    rng, chance = random.Random(7), random.Random(seed)
    hard = [rng.randint(0, 2) for _ in range(prompts)]
    return [[h + (chance.random() < shift) for _ in range(12)] for h in hard]


def test_pairing_shows_a_small_difference_that_prompts_alone_would_hide() -> None:
    found = compare_results(suite("A", noisy(0.2, 1)), suite("B", noisy(0.5, 2)), NAMES)
    (pair,), (overall,) = found.pairs, found.overall
    assert pair.difference_interval is not None
    assert 0 < pair.difference_interval[0] < 0.3 < pair.difference_interval[1] < 0.45
    assert pair.wins_b > pair.wins_a
    assert pair.wins_a + pair.wins_b + pair.ties == pair.prompts == 40
    assert overall.ratio_of_means == pytest.approx(pair.ratio)
    assert overall.verdict.startswith("B has the larger mean acceptance length")
    unpaired = figures([turn(str(i), answer(s)) for i, s in enumerate(noisy(0.2, 1))]).acceptance
    assert unpaired is not None
    assert unpaired.interval is not None
    wide = unpaired.interval[1] - unpaired.interval[0]
    assert wide > 2 * (pair.difference_interval[1] - pair.difference_interval[0])


def test_no_difference_is_not_called_one() -> None:
    found = compare_results(suite("A", noisy(0.5, 1)), suite("B", noisy(0.5, 2)), NAMES)
    assert found.overall[0].verdict.startswith("No difference in acceptance length is shown")


@pytest.mark.parametrize("prompts", [2, 9])
def test_a_handful_of_prompts_gives_no_verdict_however_clear_its_interval(prompts: int) -> None:
    """A draft and its FP8 copy once differed by 13 % over two prompts of each benchmark."""
    found = compare_results(
        suite("A", [[3, 3, 3]] * prompts), suite("B", [[1, 1, 1]] * prompts), NAMES
    )
    interval = found.overall[0].ratio_of_means_interval
    assert interval is not None
    assert interval[0] > 1
    assert found.overall[0].verdict.startswith("No verdict")
    assert "fewer than 10 prompts" in found.overall[0].verdict


def test_one_prompt_gives_no_verdict() -> None:
    found = compare_results(suite("A", [[3]]), suite("B", [[1]]), NAMES)
    assert found.pairs[0].ratio == 2
    assert found.pairs[0].ratio_interval is None
    assert found.overall[0].verdict.startswith("No verdict")


def test_prompts_are_paired_by_what_was_asked_and_the_rest_is_counted() -> None:
    a, b = suite("A", [[3], [1], [0]]), suite("B", [[3], [1]])
    found = compare_results(a, b, NAMES)
    assert (found.pairs[0].prompts, found.pairs[0].unpaired) == (2, 1)
    assert found.pairs[0].a == found.pairs[0].b == 3


def test_arms_measured_otherwise_are_left_out_and_nothing_left_is_refused() -> None:
    a = suite("A", [[3], [1]])
    other = a.arms[0].model_copy(update={"max_tokens": 7})
    with pytest.raises(DataError, match="another max_tokens"):
        compare_results(a, a.model_copy(update={"arms": (other,)}), NAMES)


def test_what_differs_besides_the_draft_is_listed() -> None:
    a = suite("A", [[3], [1]])
    b = suite("B", [[3], [1]], stack={"engine": "vllm", "target": "a target"},
              settings=SuiteSettings(concurrency=4))  # fmt: skip
    differ = compare_results(a, b, NAMES).stack_differences
    assert any(text.startswith("stack engine") for text in differ)
    assert any(text.startswith("settings concurrency") for text in differ)


def test_equal_texts_are_equal_and_different_ones_have_a_position() -> None:
    same = [turn("a", answer([1], ids=(1, 2, 3))), turn("b", answer([1], ids=(4, 5, 6)))]
    other = [turn("a", answer([2], ids=(1, 2, 3))), turn("b", answer([1], ids=(4, 9, 6)))]
    found = identity_of(same, other, NAMES)
    assert found is not None
    assert (found.same, found.of) == (1, 2)
    assert (found.divergences[0].question, found.divergences[0].token) == ("mt_bench/b", 1)


def test_where_no_ids_are_sent_positions_are_characters() -> None:
    a = [turn("a", answer([1], ids=None, text="the cat"))]
    b = [turn("a", answer([1], ids=None, text="the car"))]
    found = identity_of(a, b, NAMES)
    assert found is not None
    assert found.divergences[0].character == 6


def test_turns_behind_a_difference_do_not_count_against_it() -> None:
    a = [turn("a", answer([1], ids=(1,))), turn("a", answer([1], ids=(2,)), turn=1)]
    b = [turn("a", answer([1], ids=(9,))), turn("a", answer([1], ids=(8,)), turn=1)]
    found = identity_of(a, b, NAMES)
    assert found is not None
    assert (found.same, found.of) == (0, 1)
    assert identity_of([], b, NAMES) is None


def test_hashes_alone_find_different_answers_and_the_verdict_says_so() -> None:
    first = results("A", figures([turn(n, answer([2, 1], ids=(1, 2))) for n in "abcdef"]))
    second = results("B", figures([turn(n, answer([1, 1], ids=(1, ord(n)))) for n in "abcdef"]))
    found = compare_results(first, second, NAMES)
    assert found.pairs[0].identity[0].same == 0
    assert "6 greedy answers differ" in found.overall[0].verdict
    page = render_comparison(found, [first, second])
    assert "greedy answers differ" in page
