"""A record refuses what an engine may silently do to captured states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from made_records import made_record

from dspark.errors import DamagedArtifactError
from dspark.hidden.record import HiddenRecord

RECORD = made_record()


def poison(name: str, value: float, at: int) -> Callable[[HiddenRecord], HiddenRecord]:
    def damage(record: HiddenRecord) -> HiddenRecord:
        tensor = getattr(record, name).clone()
        tensor[at] = value
        return replace(record, **{name: tensor})

    return damage


DAMAGES: dict[str, Callable[[HiddenRecord], HiddenRecord]] = {
    # What a prefix-cache hit does: the states of cached tokens are never returned.
    "taps shortened": lambda r: replace(r, taps=r.taps[4:]),
    "final shortened": lambda r: replace(r, final=r.final[4:]),
    "taps too long": lambda r: replace(r, taps=torch.cat([r.taps, r.taps[:1]])),
    "a layer missing": lambda r: replace(r, taps=r.taps[:, :2]),
    "a layer too many": lambda r: replace(r, layer_ids=(1, 4)),
    "loss mask shortened": lambda r: replace(r, loss_mask=r.loss_mask[:-1]),
    "greedy shortened": lambda r: replace(r, greedy=r.greedy[:-1]),
    "log_z shortened": lambda r: replace(r, log_z=r.log_z[1:]),
    "ids shortened": lambda r: replace(r, ids=r.ids[1:]),
    "other width": lambda r: replace(r, final=r.final[:, :8]),
    "final flattened": lambda r: replace(r, final=r.final[:, 0]),
    "taps NaN": poison("taps", float("nan"), 0),
    "taps infinite": poison("taps", float("-inf"), 3),
    "final NaN": poison("final", float("nan"), 8),
    "log_z NaN in the answer": poison("log_z", float("nan"), 5),
    "log_z infinite in the answer": poison("log_z", float("inf"), 8),
    "no greedy token in the answer": poison("greedy", -1, 3),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_states_are_refused_and_name_their_record(
    damage: Callable[[HiddenRecord], HiddenRecord],
) -> None:
    with pytest.raises(DamagedArtifactError) as caught:
        damage(RECORD).check()
    assert RECORD.id in caught.value.where


def test_before_the_answer_greedy_and_log_z_may_be_absent() -> None:
    assert int(RECORD.greedy[0]) == -1
    assert RECORD.check() is RECORD
    assert len(RECORD) == 9
