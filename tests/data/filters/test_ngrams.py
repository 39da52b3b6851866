"""Decontamination finds exactly the prompts that share an n-gram, and can show it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data.filters import units as units_module
from dspark.data.filters.ngrams import HITS_PER_ROW, SHORTEST, NgramIndex
from dspark.data.filters.units import token_units, window_hashes, word_units, words_of
from dspark.data.filters.wrappers import unwrapped

ITEM = (
    "A farmer has 17 sheep and buys 25 more at the market, then sells 9 of them on Sunday. "
    "How many sheep are left on the farm at the end of the week?"
)


def index(*items, ngram=13, template_items=20):
    return NgramIndex(word_units([item] for item in items), ngram, template_items)


def hit_rows(found):
    return sorted({hit.row for hit in found})


def brute_force(prompts, items, ngram):
    """The definition, spelled out."""
    found = set()
    for row, prompt in enumerate(prompts):
        words = words_of(prompt)
        for item in items:
            wanted = words_of(item)
            if len(wanted) < SHORTEST:
                if words == wanted:
                    found.add(row)
                continue
            size = min(ngram, len(wanted))
            theirs = {tuple(wanted[i : i + size]) for i in range(len(wanted) - size + 1)}
            if any(tuple(words[i : i + size]) in theirs for i in range(len(words) - size + 1)):
                found.add(row)
    return sorted(found)


texts = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=30).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, min_size=1, max_size=4))
def test_hits_are_those_of_the_definition(prompts, items):
    made = index(*items, ngram=8, template_items=1000)
    found = made.hits(word_units([p] for p in prompts))
    assert hit_rows(found) == brute_force(prompts, items, 8)
    for hit in found:
        assert " ".join(hit.ngram) in " ".join(words_of(prompts[hit.row]))
        assert " ".join(hit.ngram) in " ".join(words_of(items[hit.item]))


def test_equal_hashes_alone_are_no_hit(monkeypatch):
    # Every window of every text collides: only the comparison of words is left to decide.
    monkeypatch.setattr(
        "dspark.data.filters.ngrams.window_hashes", lambda h, n: window_hashes(h, n) * 0
    )
    made = index("one two three four five six seven eight", ngram=8)
    found = made.hits(word_units([["eight seven six five four three two one"], ["other " * 9]]))
    assert found == []


@pytest.mark.parametrize(
    "wrapped",
    [
        f"<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\n{ITEM}<|im_end|>",
        f"[INST] <<SYS>>\nBe brief\n<</SYS>>\n\n{ITEM} [/INST]",
        f"Below is an instruction that describes a task.\n\n### Instruction:\n{ITEM}\n\n### Response:",
        f"USER: {ITEM}\nASSISTANT:",
        ITEM.upper().replace(" ", "\n\t"),
        f"**{ITEM}**".replace(",", " -- "),
        "Please think step by step. " + ITEM[:80] + "... now you know.",
    ],
)
def test_the_same_prompt_in_another_wrapping_is_caught(wrapped):
    found = index("something else entirely " * 5, ITEM).hits(word_units([[unwrapped(wrapped)]]))
    assert {hit.item for hit in found} == {1}
    assert len(found[0].ngram) == 13


def test_a_short_item_is_caught_whole_in_other_wrappings_and_a_tiny_one_only_alone():
    made = index("Name the largest planet we know", "Compute sin 60")
    wrapped = [
        unwrapped("<|im_start|>user\nName the largest planet we know!<|im_end|>"),
        "Hello. Name the largest planet we know, please.",
        "Name the largest planet",
        unwrapped("<s>[INST] compute SIN(60) [/INST]"),
        "compute sin 60 and more",
    ]
    assert hit_rows(made.hits(word_units([text] for text in wrapped))) == [0, 1, 3]


def test_windows_span_neither_texts_nor_rows():
    words = " ".join(f"w{i}" for i in range(26))
    first, second = words[: len(words) // 2], words[len(words) // 2 :]
    made = index(words)
    assert made.hits(word_units([[words]]))
    middle = " ".join(f"w{i}" for i in range(6, 19))
    a, b = middle.split("w12")
    assert made.hits(word_units([[a, "w12 " + b]])) == []
    assert made.hits(word_units([[a], ["w12 " + b]])) == []
    del first, second


def test_what_many_items_share_is_their_template_not_a_hit():
    opening = "The following are multiple choice questions with answers about the subject of world history"
    items = [f"{opening} {' '.join(f'i{n}w{k}' for k in range(13))}" for n in range(30)]
    made = index(*items, template_items=20)
    assert made.ignored >= 1
    own = " ".join(f"i3w{k}" for k in range(13))
    found = made.hits(word_units([[opening + " of Mars"], [own]]))
    assert [(hit.row, hit.item) for hit in found] == [(1, 3)]
    assert hit_rows(index(*items, template_items=30).hits(word_units([[opening]]))) == [0]


def test_hits_of_one_row_are_limited_and_name_different_items():
    items = [ITEM + f" variant {n}" for n in range(9)]
    found = index(*items).hits(word_units([[ITEM]]))
    assert len(found) == len({hit.item for hit in found}) <= HITS_PER_ROW


def test_texts_without_spaces_are_compared_by_characters():
    item = "请问中国的首都是哪个城市它有多少人口和多长的历史"
    found = index(item).hits(word_units([["老师说：" + item + "？谢谢"]]))
    assert len(found) == 1
    assert len(found[0].ngram) == 13


def test_tokens_are_compared_like_words():
    rng = random.Random(0)
    item = [rng.randrange(1000) for _ in range(40)]
    made = NgramIndex(token_units([[item]]), 13, 20)
    prompts = [[1, 2, *item[20:33], 3], item[20:32], list(reversed(item))]
    found = made.hits(token_units([[ids] for ids in prompts]))
    assert [(hit.row, list(hit.ngram)) for hit in found] == [(0, item[20:33])]


def test_nothing_to_compare_with_gives_no_hit():
    for items in ([], [""], ["?!"]):
        assert index(*items).hits(word_units([["some words here"], [""]])) == []
    assert index(ITEM).hits(word_units([])) == []
    assert index(ITEM).hits(word_units([[""], []])) == []


def test_hashes_of_words_are_the_same_in_every_process():
    # Pinned: signatures on disk are compared with signatures of a later process.
    assert units_module.word_units([["Hello, world"]]).hashes.tolist() == [
        int.from_bytes(__import__("hashlib").blake2b(w, digest_size=8).digest(), "little")
        for w in (b"hello", b"world")
    ]
