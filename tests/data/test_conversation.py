"""What is asked next and which rows come of it: turns, cuts, seeds, temperatures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dspark.config.answers import RegenerateSection
from dspark.data.conversation import Conversation, Maker, Reply, answer_seed, temperature_of
from dspark.data.prompt import make_prompt
from dspark.data.reasoning import split_reasoning

MAKER = Maker("m", None, "embedded")


def talk(*turns: str, tools: Any = (), reads_calls: bool = True, **settings: Any) -> Conversation:
    section = RegenerateSection(**{"temperatures": (0.0,), **settings})
    return Conversation(
        make_prompt("train", "chat", list(turns), tools=tools), section, reads_calls
    )


def said(prompt: list[int], ids: list[int], finish: str = "stop", text: str = "x") -> Reply:
    return Reply(tuple(prompt), tuple(ids), finish, text, text, None, MAKER)  # type: ignore[arg-type]


def test_a_turn_that_continues_the_very_ids_extends_the_row() -> None:
    one = talk("a", "b")
    one.take(said([1, 2], [3, 4, 9]))
    assert one.ask().messages[-1] == {"role": "user", "content": "b"}
    one.take(said([1, 2, 3, 4, 9, 5, 6], [7, 8, 9]))
    (row,) = one.rows()
    assert row.ids == (1, 2, 3, 4, 9, 5, 6, 7, 8, 9)
    assert row.loss_mask == (0, 0, 1, 1, 1, 0, 0, 1, 1, 1)
    assert one.ended


def test_a_turn_whose_past_was_rewritten_is_a_row_of_its_own() -> None:
    one = talk("a", "b")
    one.take(said([1, 2], [3, 4, 9]))
    one.take(said([1, 2, 4, 9, 5], [7, 8, 9]))
    first, second = one.rows()
    assert first.loss_mask == (0, 0, 1, 1, 1)
    assert second.ids == (1, 2, 4, 9, 5, 7, 8, 9)
    assert second.loss_mask == (0, 0, 0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(("policy", "rows"), [("keep", 1), ("drop", 0)])
def test_a_cut_answer_is_kept_without_an_end_or_dropped_and_nothing_follows(
    policy: str, rows: int
) -> None:
    one = talk("a", "b", "c", on_length=policy)
    one.take(said([1, 2], [3, 4, 5], "length"))
    assert one.ended
    found = one.rows()
    assert len(found) == rows
    assert all(row.ids == (1, 2, 3, 4, 5) and row.finish_reason == "length" for row in found)
    assert one.tally["finish length"] == 1
    assert sum(n for name, n in one.tally.items() if name.startswith("later turns")) == 2
    assert one.tally["dropped truncated"] == 1 - rows


def test_a_dropped_second_answer_leaves_the_first() -> None:
    one = talk("a", "b", on_length="drop")
    one.take(said([1], [2, 9]))
    one.take(said([1, 2, 9, 3], [4, 5], "length"))
    (row,) = one.rows()
    assert row.ids == (1, 2, 9)


def test_a_cut_answer_goes_on_with_its_own_ids_until_it_ends() -> None:
    one = talk("a", on_length="continue", continuations=2)
    seeds = [one.ask().params.seed]
    one.take(said([1, 2], [3, 4], "length", "x<think>"))
    seeds.append(one.ask().params.seed)
    assert one.ask().so_far == (1, 2, 3, 4)
    one.take(said([1, 2, 3, 4], [5, 9], "stop", "y"))
    (row,) = one.rows()
    assert row.ids == (1, 2, 3, 4, 5, 9)
    assert row.loss_mask == (0, 0, 1, 1, 1, 1)
    assert row.finish_reason == "stop"
    assert seeds[0] != seeds[1]


def test_continuing_has_an_end() -> None:
    one = talk("a", on_length="continue", continuations=1)
    one.take(said([1], [2, 3], "length"))
    one.take(said([1, 2, 3], [4, 5], "length"))
    assert one.ended
    assert one.rows()[0].finish_reason == "length"


def test_an_answer_of_nothing_but_its_end_is_dropped_and_counted() -> None:
    one = talk("a", "b")
    one.take(said([1, 2], [9], text=""))
    assert one.ended
    assert one.rows() == []
    assert one.tally["dropped empty"] == 1


def test_only_so_many_turns_are_asked() -> None:
    one = talk("a", "b", "c", "d", turns=2)
    one.take(said([1], [2, 9]))
    one.take(said([1, 2, 9, 3], [4, 9]))
    assert one.ended
    assert one.tally["later turns after regenerate.turns"] == 2


def test_without_a_reader_of_tool_calls_nothing_follows_an_answer_with_tools() -> None:
    one = talk("a", "b", tools=[{"type": "function"}], reads_calls=False)
    one.take(said([1], [2, 9]))
    assert one.ended
    assert one.tally["later turns after an answer with tools"] == 1


def test_the_sampling_of_a_row_depends_on_its_id_alone_and_mixes_evenly() -> None:
    section = RegenerateSection(temperatures=(0.0, 1.0), top_p=0.95)
    names = [f"chat-train-{n:016x}" for n in range(4000)]
    found = Counter(temperature_of(name, section) for name in names)
    assert abs(found[0.0] - 2000) < 4 * 4000**0.5 / 2
    assert len({answer_seed(name) for name in names}) > 3990
    three = RegenerateSection(temperatures=(0.0, 1.0, 1.0))
    share = Counter(temperature_of(name, three) for name in names)[0.0] / 4000
    assert abs(share - 1 / 3) < 0.03
    greedy = Conversation(
        make_prompt("train", "chat", ["x"]), RegenerateSection(temperatures=(0.0,), top_p=0.5)
    )
    warm = Conversation(
        make_prompt("train", "chat", ["x"]), RegenerateSection(temperatures=(0.7,), top_p=0.5)
    )
    assert (greedy.ask().params.top_p, warm.ask().params.top_p) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Hello", None, "Hello"),
        ("<think>\nwhy\n</think>\n\nHello", "why", "Hello"),
        ("why\n</think>\n\nHello", "why", "Hello"),  # the template wrote the opening mark
        ("◁think▷why◁/think▷Hello", "why", "Hello"),
        ("<think>cut while reaso", "cut while reaso", ""),
        ("a < b and </p>", None, "a < b and </p>"),
    ],
)
def test_reasoning_is_found_in_the_text(text: str, reasoning: str | None, answer: str) -> None:
    assert split_reasoning(text) == (reasoning, answer)
