"""The generator is a pure function of seed, split and index, and its stated answers are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.word_problems import (
    FAMILIES,
    INSTRUCTION,
    make_problem,
    word_problem,
    word_problems,
)
from dspark.errors import DataError

# Answers recomputed from the numbers as they appear in the text, by formulas of their own.
SOLVE = {
    "shopping": lambda n, price: n * price,
    "change": lambda n, price, note: note - n * price,
    "sharing": lambda total, friends: total / friends,
    "keep_and_share": lambda total, kept, friends: (total - kept) / friends,
    "travel": lambda speed, hours: speed * hours,
    "baking": lambda trays, per, given: trays * per - given,
    "recipe": lambda eggs, people, guests: eggs * guests / people,
    "saving": lambda start, weekly, weeks: start + weekly * weeks,
    "saving_goal": lambda cost, start, weekly: (cost - start) / weekly,
    "classroom": lambda rows, seats, empty: rows * seats - empty,
    "reading": lambda pages, daily, days: pages - daily * days,
    "garden": lambda rows, per, lost: rows * per - lost,
    "passengers": lambda start, off, on: start - off + on,
    "picking": lambda first, more: first + (first + more),
    "practice": lambda minutes, days, extra: minutes * days + extra,
}


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_every_answer_is_the_one_the_text_implies(seed, index, split):
    problem = make_problem(seed, index, split)
    numbers = [int(n) for n in re.findall(r"\d+", problem.text)]
    if problem.family == "two_legs":
        words = {"twice": 2, "three times": 3, "four times": 4}
        factor = next(n for word, n in words.items() if word in problem.text)
        expected = numbers[0] + numbers[0] * factor
    else:
        expected = SOLVE[problem.family](*numbers)
    assert problem.answer == expected
    assert problem.answer > 0
    assert max([*numbers, problem.answer]) < 1000


@given(st.integers(0, 10**6))
def test_a_prompt_is_a_few_sentences_one_question_and_the_instruction(index):
    text = word_problem(0, index)
    problem, _, rest = text.partition("?")
    assert rest == f" {INSTRUCTION}"
    assert 1 <= problem.count(".") <= 3
    assert "  " not in text
    assert text.isascii()


def test_text_is_equal_in_another_process_with_another_hash_seed():
    code = (
        "from dspark.data.word_problems import word_problem as w;"
        "print([w(7, i, 'held_out') for i in range(40)])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str([word_problem(7, i, "held_out") for i in range(40)])


def test_known_text_never_changes():
    # A changed template or stream silently changes every data set made so far: change on purpose.
    assert word_problem(0, 0) == (
        "Jana wants to buy a guitar that costs 158 dollars. Jana already has 50 dollars and saves "
        "12 dollars every week. How many weeks does Jana have to save? "
        "Answer in a few short sentences and finish with the result."
    )


def test_all_families_appear_about_equally_often():
    counts = Counter(make_problem(3, i).family for i in range(3200))
    assert set(counts) == set(FAMILIES)
    assert len(FAMILIES) == 16
    assert min(counts.values()) > 140
    assert max(counts.values()) < 260


def test_splits_seeds_and_indices_give_different_streams():
    streams = [
        tuple(word_problem(seed, i, split) for i in range(20))
        for seed in (0, 1)
        for split in ("train", "held_out")
    ]
    assert len(set(streams)) == 4


def test_no_held_out_text_is_a_training_text_and_counts_are_exact():
    rows = list(word_problems(0, train=20_000, held_out=2_000))
    train = [text for split, text in rows if split == "train"]
    held_out = [text for split, text in rows if split == "held_out"]
    assert (len(train), len(held_out)) == (20_000, 2_000)
    assert len(set(train) | set(held_out)) == 22_000
    # The check had work to do: raw streams of this size do collide.
    raw = {word_problem(0, i, "held_out") for i in range(2_000)}
    assert raw & set(train)


def test_more_problems_than_templates_hold_is_an_error_not_an_endless_loop(monkeypatch):
    monkeypatch.setattr("dspark.data.word_problems.FAMILIES", {"same": lambda draw: ("Two?", 2)})
    with pytest.raises(DataError, match="1 different ones"):
        list(word_problems(0, train=2, held_out=0))


def test_negative_seed_or_index_is_refused():
    with pytest.raises(DataError, match="seed -1"):
        make_problem(-1, 0)
    with pytest.raises(DataError, match="index -5"):
        make_problem(0, -5)
