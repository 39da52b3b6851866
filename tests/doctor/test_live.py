"""What the live examination concludes from its figures."""

from __future__ import annotations

import pytest

from dspark.decoding.acceptance import AcceptanceCounter, StepCount
from dspark.decoding.request import Generation
from dspark.doctor.conventions import FAMILIES
from dspark.doctor.live import Expected, _judge, best_fit, check_acceptance
from dspark.doctor.probe import Score

LAYERS = next(family for family in FAMILIES if family.id == "live.layers")


def score(length: float) -> Score:
    """Four examples of about this acceptance length, every slot of 7 accepted alike."""
    lengths = (length, length + 0.1, length - 0.1, length)
    return Score(tuple((slot_acceptance(x),) * 7 for x in lengths), lengths)


def slot_acceptance(length: float) -> float:
    """The c with 1 + c + c^2 + ... + c^7 = ``length``, to a thousandth."""
    found = (c / 1000 for c in range(1001) if sum((c / 1000) ** j for j in range(8)) >= length)
    return next(found, 1.0)


def answers(accepted: int, prompts: int = 8, steps: int = 10) -> list[Generation]:
    """Every step of every prompt accepts ``accepted`` of seven drafted tokens."""
    out = []
    for _ in range(prompts):
        counter = AcceptanceCounter(7)
        for _ in range(steps):
            counter.add(StepCount(7, 7, accepted))
        out.append(Generation(counter=counter))
    return out


def test_only_the_best_explanation_fails_and_the_others_point_to_it() -> None:
    tried = {"live.layers": {"one lower": score(3.0)}, "live.labels": {"late": score(6.0)}}
    best = best_fit(score(2.0), tried)
    assert best == "live.labels"
    other = _judge(LAYERS, score(2.0), tried["live.layers"], best)
    assert other.status == "warn"
    assert "live.labels" in other.mend
    assert _judge(LAYERS, score(2.0), tried["live.layers"], "live.layers").status == "fail"
    assert best_fit(score(7.0), tried) is None


def test_a_draft_that_fits_nothing_is_not_called_right() -> None:
    found = _judge(LAYERS, score(1.02), {"one lower": score(1.03)}, None)
    assert found.status == "skip"
    assert "nothing to tell" in found.found
    assert _judge(LAYERS, score(3.0), {"one lower": score(2.5)}, None).status == "pass"


def test_a_right_answer_says_when_the_draft_cannot_tell() -> None:
    """A draft that is not fully trained hardly uses some inputs: passing means less then."""
    clear = _judge(LAYERS, score(3.0), {"one lower": score(2.5)}, None)
    close = _judge(LAYERS, score(3.0), {"one lower": score(2.95)}, None)
    assert (clear.status, close.status) == ("pass", "pass")
    assert "told apart" in close.found
    assert "told apart" not in clear.found


@pytest.mark.parametrize(
    ("accepted", "expected", "status"),
    [
        (4, Expected(5.2, "bench", True), "pass"),
        (4, Expected(6.2, "bench", True), "pass"),  # 5.0 is more than 0.8 of it
        (4, Expected(6.5, "bench", True), "fail"),
        (4, Expected(6.5, "provenance", False), "warn"),
        (4, None, "warn"),
        (0, None, "fail"),
        (0, Expected(1.2, "bench", True), "fail"),
    ],
)
def test_acceptance_is_judged_against_what_was_promised(accepted, expected, status: str) -> None:
    found = check_acceptance(expected, answers(accepted))
    assert found.status == status
    assert f"{1 + accepted:.2f}" in found.found


def test_answers_without_a_step_say_nothing_about_acceptance() -> None:
    assert check_acceptance(None, [Generation(counter=AcceptanceCounter(7))]).status == "skip"
