"""Captured states are the target's own: by hand, alone or in a batch, prefix shared or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from captured_targets import (
    TAPS,
    VOCAB,
    by_hand,
    make_answers,
    make_target,
    one_thread,  # noqa: F401 (autouse)
)
from hypothesis import given
from hypothesis import strategies as st

from dspark.artifacts.progress import OnDone, untold
from dspark.capture.embedded import capture, length_batches
from dspark.errors import DataError
from dspark.hidden.answers import Answer
from dspark.hidden.disk import DiskStore
from dspark.hidden.record import HiddenRecord
from dspark.model.cache import shared_prefix
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from told import Told

TARGET = make_target()
SHARED = 20


def captured(
    folder: Path,
    answers: Sequence[Answer],
    target: DecoderTarget = TARGET,
    *,
    batch_tokens: int = 100_000,
    dtype: torch.dtype = torch.float32,
) -> dict[str, HiddenRecord]:
    folder.mkdir(exist_ok=True)
    store = DiskStore(folder)
    capture(target, answers, store, batch_tokens=batch_tokens, dtype=dtype)
    return {i: store.get(i) for i in store.ids()}


@pytest.mark.parametrize("shared", [0, SHARED])
def test_states_equal_a_forward_written_by_hand(tmp_path: Path, shared: int) -> None:
    answers = make_answers(3, shared=shared)
    records = captured(tmp_path, answers)
    for answer in answers:
        record = records[answer.id]
        taps, final = by_hand(TARGET, list(answer.ids))
        assert record.taps.shape == taps.shape == (len(answer.ids), len(TAPS), 32)
        assert float((record.taps - taps).abs().max()) < 2e-5
        assert float((record.final - final).abs().max()) < 2e-5
        logits = final @ TARGET.head_weight().double().T
        answered = slice(answer.prompt_length - 1, None)
        assert torch.equal(record.greedy[answered].long(), logits[answered].argmax(-1))
        want = torch.logsumexp(logits, -1)[answered]
        assert float((record.log_z[answered] - want).abs().max()) < 1e-4
        # Layer ids count decoder layers from 0, and the tap lies behind the layer.
        assert float((record.taps - taps.roll(1, 1)).abs().max()) > 0.1


def test_records_say_what_they_are(tmp_path: Path) -> None:
    answers = make_answers(4, shared=SHARED)
    records = captured(tmp_path, answers)
    for answer in answers:
        record = records[answer.id]
        size, prompt = len(answer.ids), answer.prompt_length
        assert record.ids.tolist() == list(answer.ids)
        assert record.loss_mask.tolist() == [0] * prompt + [1] * (size - prompt)
        assert record.layer_ids == TAPS
        assert record.norm_state == "post"
        assert (record.category, record.temperature) == (answer.category, answer.temperature)
        assert record.greedy[: prompt - 1].tolist() == [-1] * (prompt - 1)
        assert bool(torch.isnan(record.log_z[: prompt - 1]).all())


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("shared", [0, SHARED])
def test_a_sequence_alone_equals_the_same_in_a_batch(
    tmp_path: Path, attention: Literal["gqa", "mla"], shared: int
) -> None:
    target, answers = make_target(attention), make_answers(7, shared=shared)
    assert shared_prefix([a.ids[: a.prompt_length] for a in answers]) == shared
    together = captured(tmp_path / "together", answers, target)
    repeated = captured(tmp_path / "repeated", answers, target, batch_tokens=1)
    for answer in answers:
        one = captured(tmp_path / answer.id, [answer], target)[answer.id]
        plain = target(torch.tensor([answer.ids]), Span.alone(1, len(answer.ids), target.device))
        for other in (together[answer.id], repeated[answer.id]):
            assert float((one.taps - other.taps).abs().max()) < 1e-5
            assert float((one.final - other.final).abs().max()) < 1e-5
            assert torch.equal(one.greedy, other.greedy)
            assert torch.allclose(one.log_z, other.log_z, atol=1e-4, equal_nan=True)
        assert torch.allclose(one.final, plain.final[0], atol=1e-6)
        assert torch.allclose(one.taps, plain.taps[0], atol=1e-6)


def test_every_token_has_states_though_the_prefix_ran_once(tmp_path: Path) -> None:
    """An engine's prefix cache returned 6 states of 26; here the length is checked on the way."""
    answers = make_answers(5, shared=SHARED)
    records = captured(tmp_path, answers)
    for answer in answers:
        record = records[answer.id]
        assert len(record.taps) == len(record.final) == len(answer.ids) > SHARED
        assert torch.equal(record.taps[:SHARED], records["a-00"].taps[:SHARED])


def test_stored_precision_rounds_states_only_and_log_z_belongs_to_what_is_stored(
    tmp_path: Path,
) -> None:
    answers = make_answers(4, shared=0)
    exact = captured(tmp_path / "exact", answers)
    for name, record in captured(tmp_path / "bf16", answers, dtype=torch.bfloat16).items():
        assert record.taps.dtype == record.final.dtype == torch.bfloat16
        assert torch.equal(record.taps, exact[name].taps.bfloat16())
        assert torch.equal(record.greedy, exact[name].greedy)  # from unrounded logits
        answered = record.loss_mask.bool()
        logits = record.final[answered].float() @ TARGET.head_weight().T
        p = torch.exp(logits - record.log_z[answered].unsqueeze(-1)).sum(-1)
        assert float((p - 1).abs().max()) < 1e-4
        assert not torch.equal(record.log_z[answered], exact[name].log_z[answered])


def test_existing_records_are_skipped_and_the_rest_is_added(tmp_path: Path) -> None:
    answers = make_answers(6, shared=SHARED)
    store = DiskStore(tmp_path)

    def run(answers: Sequence[Answer], on_tokens: OnDone = untold) -> int:
        return capture(
            TARGET, answers, store, batch_tokens=64, dtype=torch.float32, on_tokens=on_tokens
        )

    assert run(answers[2:4]) == 2
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.iterdir()}
    told = Told()
    assert run(answers, told) == 4
    assert told.kept == sum(len(a.ids) for a in answers[2:4])
    assert told.made == sum(len(a.ids) for a in answers) - told.kept
    assert store.ids() == [a.id for a in answers]
    after = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert run(answers) == 0
    assert run([]) == 0
    whole = captured(tmp_path / "whole", answers)
    for answer in answers:
        got = store.get(answer.id)
        assert torch.allclose(got.final, whole[answer.id].final, atol=1e-5)


@given(
    st.lists(st.integers(2, 40), max_size=30),
    st.integers(1, 200),
)
def test_batches_hold_every_answer_once_and_stay_below_the_size(
    lengths: list[int], limit: int
) -> None:
    answers = [
        Answer(
            id=f"{i:03d}",
            category="x",
            temperature=0.0,
            prompt_length=1,
            finish_reason="stop",
            ids=tuple(range(n)),
        )
        for i, n in enumerate(lengths)
    ]
    batches = list(length_batches(answers, limit))
    assert sorted(a.id for batch in batches for a in batch) == [a.id for a in answers]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(a.ids) for a in batch) <= limit
    flat = [len(a.ids) for batch in batches for a in batch]
    assert flat == sorted(flat)
    for batch, following in pairwise(batches):  # and no batch could have taken the next one
        assert (len(batch) + 1) * len(following[0].ids) > limit


def test_token_ids_of_another_vocabulary_do_not_pass(tmp_path: Path) -> None:
    wrong = {"ids": (1, 2, 3, VOCAB), "prompt_length": 2}
    alien = make_answers(1, shared=0)[0].model_copy(update=wrong)
    with pytest.raises(DataError, match=alien.id):
        captured(tmp_path, [alien])
    assert not DiskStore(tmp_path).ids()
