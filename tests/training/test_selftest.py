"""The start-up self-test refuses what a public run trained ten epochs on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    answer,
    before_norm,
    one_thread,  # noqa: F401 (autouse)
    plain_forward,
    record_of,
    tiny_records,
    tiny_target,
)

from dspark.errors import SelfTestError
from dspark.hidden.record import HiddenRecord
from dspark.training.selftest import measure_agreement, require_sound_states

TARGET = tiny_target()
HEAD = TARGET.head_weight()
RECORDS = tiny_records(TARGET, 6)


def raw_records() -> list[HiddenRecord]:
    return [replace(r, final=before_norm(TARGET, r)) for r in RECORDS]


def test_sound_states_pass_in_fp32_and_in_stored_bf16() -> None:
    found = require_sound_states(RECORDS, HEAD, TARGET.norm)
    answered = sum(int(r.loss_mask.sum()) for r in RECORDS)
    greedy = sum(int(r.loss_mask.sum()) for r in RECORDS if r.temperature == 0)
    assert (found.states, found.states_positions) == (1.0, answered)
    assert (found.order, found.order_positions) == (1.0, greedy)
    stored = [replace(r, final=r.final.bfloat16()) for r in RECORDS]
    assert measure_agreement(stored, HEAD, TARGET.norm).states > 0.95


def test_states_from_before_the_norm_are_refused_when_called_post() -> None:
    with pytest.raises(SelfTestError, match="argmax") as caught:
        require_sound_states(raw_records(), HEAD, TARGET.norm)
    assert "norm" in caught.value.fix


def test_states_from_before_the_norm_pass_when_they_say_so() -> None:
    honest = [replace(r, norm_state="pre") for r in raw_records()]
    assert require_sound_states(honest, HEAD, TARGET.norm).states == 1.0


def test_a_norm_applied_twice_is_refused() -> None:
    doubled = [replace(r, norm_state="pre") for r in RECORDS]
    with pytest.raises(SelfTestError):
        require_sound_states(doubled, HEAD, TARGET.norm)


def test_states_shifted_by_one_token_are_refused() -> None:
    shifted = [replace(r, final=r.final.roll(1, 0)) for r in RECORDS]
    with pytest.raises(SelfTestError, match="argmax"):
        require_sound_states(shifted, HEAD, TARGET.norm)


def test_states_shifted_together_with_the_engines_own_tokens_are_refused() -> None:
    """An engine that is off by one agrees with itself; only the order of the answer tells."""
    shifted = [replace(r, final=r.final.roll(1, 0), greedy=r.greedy.roll(1, 0)) for r in RECORDS]
    with pytest.raises(SelfTestError, match="follow") as caught:
        require_sound_states(shifted, HEAD, TARGET.norm)
    assert "shifted" in caught.value.fix


def test_another_targets_head_is_refused() -> None:
    with pytest.raises(SelfTestError):
        require_sound_states(RECORDS, tiny_target(seed=9).head_weight(), TARGET.norm)


def test_answers_of_another_model_are_refused() -> None:
    """States and tokens agree with each other, but somebody else wrote the answers."""
    other = tiny_target(seed=9)
    foreign = [
        record_of(TARGET, answer(other, [5, 6, 7 + i], 12), 3, name=f"foreign-{i}")
        for i in range(4)
    ]
    with pytest.raises(SelfTestError, match="follow"):
        require_sound_states(foreign, HEAD, TARGET.norm)


def test_without_greedy_answers_nothing_is_proven() -> None:
    sampled = [r for r in RECORDS if r.temperature > 0]
    with pytest.raises(SelfTestError, match="temperature 0"):
        require_sound_states(sampled, HEAD, TARGET.norm)
    with pytest.raises(SelfTestError):
        require_sound_states([], HEAD, TARGET.norm)


def test_the_plain_forward_used_here_is_the_targets_own() -> None:
    record = RECORDS[0]
    assert torch.equal(plain_forward(TARGET, record.ids.tolist()).final, record.final)
    assert torch.allclose(TARGET.norm(before_norm(TARGET, record)), record.final, atol=1e-6)
