"""States of another engine are held against the target's own, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.doctor.engine import check_taps, example_of
from dspark.doctor.probe import EMBEDDING_LAYER


def test_an_engine_that_counts_layers_otherwise_is_convicted_by_name(tiny_target: Path) -> None:
    target = load_target(TargetSection(source=str(tiny_target), max_context=256)).build((0, 1, 2))
    right = [example_of(target, list(range(7, 7 + length)), 4) for length in (20, 31)]
    noise = torch.Generator().manual_seed(0)

    def nearly(state: torch.Tensor) -> torch.Tensor:
        return state * (1 + 1e-3 * torch.randn(state.shape, generator=noise))

    rounded = [replace(e, states={i: nearly(s) for i, s in e.states.items()}) for e in right]
    assert check_taps(target, (0, 1), rounded).status == "pass"
    lower = [
        replace(e, states={**e.states, 0: e.states[EMBEDDING_LAYER], 1: e.states[0]}) for e in right
    ]
    found = check_taps(target, (0, 1), lower)
    assert found.status == "fail"
    assert "for layer 0 it hands out the embedding" in found.cause
    assert "for layer 1 it hands out that of layer 0" in found.cause
    other = [replace(e, states={**e.states, 1: 1.5 * e.states[1]}) for e in right]
    assert "no stream of the target" in check_taps(target, (0, 1), other).cause
    assert check_taps(target, (0, 1), []).status == "skip"
