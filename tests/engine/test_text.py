"""Pieces of text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.engine.text import TextStream

WORDS = [bytes([i]) for i in range(256)]


def decode(ids: list[int]) -> str:
    """One token a byte, as byte-level tokenizers fall back to."""
    return b"".join(WORDS[i] for i in ids).decode(errors="replace")


@given(st.text(max_size=12))
def test_no_piece_ends_inside_a_character_and_all_add_up(text: str) -> None:
    stream, shown = TextStream(decode), ""
    for token in text.encode():
        stream.push(token)
        shown += stream.fresh(final=False)
        assert text.startswith(shown)
    stream.finish()
    assert shown + stream.fresh(final=True) == text == stream.text


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    stream = TextStream(decode)
    for token in (*b"a", 0xE2, 0x82):
        stream.push(token)
    assert stream.fresh(final=False) == "a"
    stream.finish()
    assert stream.fresh(final=True) == "�"


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_at_the_first_stop_string_to_be_complete(text: str, stops: list[str]) -> None:
    stream, shown, used = TextStream(decode, stops), "", 0
    for token in text.encode():
        used += 1
        stopped = stream.push(token)
        shown += stream.fresh(final=stopped)
        if stopped:
            break
    complete = [n for n in range(len(text) + 1) if any(s in text[:n] for s in stops)]
    if not complete:
        assert stream.stopped_by is None
        assert used == len(text)
        return
    assert used == complete[0]
    assert stream.stopped_by in stops
    cut = min(text[:used].find(s) for s in stops if s in text[:used])
    assert stream.text == text[:cut] == shown


@pytest.mark.parametrize(("include", "text"), [(True, "xENDI"), (False, "x")])
def test_the_stop_string_is_kept_on_demand(include: bool, text: str) -> None:
    stream = TextStream(lambda ids: "".join(["xEND", "IJ"][i] for i in ids), ("ENDI",),
                        include_stop=include)  # fmt: skip
    assert not stream.push(0)
    assert stream.push(1), "the token that completes it brings more text: that is cut too"
    assert stream.text == text


def test_stop_strings_before_the_minimum_length_pass() -> None:
    stream = TextStream(decode, ("a",))
    assert not stream.push(ord("a"), search=False)
    assert not stream.push(ord("b"))
    assert stream.push(ord("a"))
    assert stream.text == "ab"
