"""Requests of unlike length attend in groups; every kind of target answers as it does alone."""

from __future__ import annotations

import random

import pytest

from dspark.decoding.params import SamplingParams
from dspark.engine.core import EngineCore
from dspark.model import spans
from engine.hybrid_pairs import VOCAB, HybridPair

LENGTHS = [1, 2, 5, 40, 3, 61, 30, 8]


def drafts(core: EngineCore) -> dict[tuple[int, ...], list[int]]:
    """What the engine will have drafted, by the length of the prompt and the text before it."""
    found: dict[tuple[int, ...], list[int]] = {}
    draft = core.runner.draft

    def recorded(requests):
        blocks, signals = draft(requests)
        found.update(
            {(len(r.prompt), *r.prompt, *r.output): list(b.ids) for r, b in blocks.items()}
        )
        return blocks, signals

    core.runner.draft = recorded
    return found


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=24)
    names = [core.submit(ids, params) for ids in prompts]
    while core.unfinished:
        core.step()
    return [core.collect(name).completions[0].ids for name in names]


@pytest.mark.parametrize("kind", ["gqa", "latent", "hybrid"])
def test_groups_of_requests_answer_as_requests_alone(kind: str, request, monkeypatch) -> None:
    if kind == "gqa":
        pair = request.getfixturevalue("pair")
        prompts = [(pair.prompts[n] * 4)[:length] for n, length in enumerate(LENGTHS)]
    else:
        pair = HybridPair.latent() if kind == "latent" else HybridPair.of()
        rng = random.Random(3)
        prompts = [[rng.randrange(1, VOCAB - 1) for _ in range(n)] for n in LENGTHS]
    alone = answers(pair.engine(draft=False, max_requests=1, prefix_cache=False), prompts)
    lone = pair.engine(max_requests=1, prefix_cache=False)
    wanted = drafts(lone)
    assert answers(lone, prompts) == alone
    monkeypatch.setattr(spans, "SAVED", 1)
    seen: list[int] = []
    groups_of = spans.groups_of
    monkeypatch.setattr(
        spans, "groups_of", lambda s: (found := groups_of(s), seen.append(len(found)))[0]
    )
    together = pair.engine(max_requests=8, prefix_cache=False)
    drafted = drafts(together)
    assert answers(together, prompts) == alone
    assert max(seen) > 3, "grouped, prompts and blocks alike"
    assert drafted == wanted
    threshold = pair.engine(max_requests=8, scheduler="threshold", confidence_threshold=0.5)
    assert answers(threshold, prompts) == alone
