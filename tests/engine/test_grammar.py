"""Grammars under speculation: every row of a block is masked, and the text is the plain one."""

from __future__ import annotations

import json
import re

import pytest

from dspark.decoding.params import Grammar, SamplingParams
from dspark.errors import DecodingError
from engine.pairs import Pair, run

pytest.importorskip("llguidance")

SUM = Grammar("regex", r"(tom|mia|ben) has [0-9]\+[0-9]=[0-9]+; (yes|no)")
# The tiny vocabulary has no braces or quotes: an array of numbers is all it can write as JSON.
NUMBERS = Grammar("lark", 'start: N ("," N)+ "."\nN: /[0-9]{1,3}/')


def params(temperature: float, seed: int, grammar: Grammar, **fields) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, grammar=grammar, max_new_tokens=60, **fields
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_matches_its_grammar(pair: Pair, temperature: float) -> None:
    each = [params(temperature, i, SUM if i % 2 else NUMBERS) for i in range(12)]
    done = run(pair.engine(), pair.prompts[:12], each)
    for completion, own in zip(done, each, strict=True):
        pattern = SUM.text if own.grammar is SUM else r"[0-9]{1,3}(,[0-9]{1,3})+\."
        if completion.finish_reason == "stop":
            assert re.fullmatch(pattern, completion.text), completion.text
    assert sum(c.finish_reason == "stop" for c in done) >= 6
    assert sum(c.acceptance.accepted for c in done) > 20


def test_greedy_text_under_a_grammar_is_the_plain_one(pair: Pair) -> None:
    plain = run(pair.engine(draft=False), pair.prompts[:10], params(0.0, 0, SUM))
    draft = run(pair.engine(), pair.prompts[:10], params(0.0, 0, SUM))
    assert [c.ids for c in draft] == [c.ids for c in plain]
    free = run(pair.engine(), pair.prompts[:10], SamplingParams(max_new_tokens=60))
    assert all(a.ids != b.ids for a, b in zip(free, draft, strict=True))


def test_impossible_grammars_are_refused(pair: Pair) -> None:
    engine = pair.engine()
    for bad in (Grammar("regex", "((("), Grammar("json", "{"), Grammar("lark", "start: x")):
        with pytest.raises(DecodingError, match="grammar"):
            engine.submit([1], params(0.0, 0, bad))
    with pytest.raises(DecodingError, match="grammar"):
        engine.submit([1], params(0.0, 0, SUM, ignore_eos=True))
    # This vocabulary has no "[": what no token can begin is told when it is sent, not in the batch.
    array = json.dumps({"type": "array", "items": {"type": "integer"}})
    with pytest.raises(DecodingError, match="doesn't satisfy the grammar"):
        engine.submit([1], params(0.0, 0, Grammar("json", array)))
    engine.submit([1], params(0.0, 0, Grammar("json", json.dumps({"type": "integer"}))))
