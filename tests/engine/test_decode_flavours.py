"""Both flavours of a draft in the engine, on an ordinary (grouped-query) target.

Drafts are trained here for seconds, so that something is accepted: identity with plain decoding
means nothing when every draft is thrown away.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config.architecture import Flavour
from dspark.decoding.params import SamplingParams
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.training.stage import train_draft
from engine.pairs import check_rows_after_decoding
from training.tiny_models import (
    one_thread,  # noqa: F401 (autouse)
    target_parts,
    tiny_config,
    tiny_records,
    tiny_section,
    tiny_target,
)

TARGET = tiny_target()
END = frozenset({0})
PROMPTS = [record.ids[:4].tolist() for record in tiny_records(TARGET, 24)]


@pytest.fixture(scope="module", params=["k3", "qwen3"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    flavour: Flavour = request.param
    folder: Path = tmp_path_factory.mktemp(flavour)
    section = tiny_section(epochs=30.0, learning_rate=6e-3, num_anchors=16, eval_every=1000)
    trained = train_draft(
        tiny_config("vanilla", flavour),
        target_parts(TARGET),
        tiny_records(TARGET, 24),
        section,
        folder,
        vocabulary_size=None,
    )
    return Drafter(trained.draft, TARGET.head_weight())


def params(temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_new_tokens=24)


def test_greedy_text_is_identical_to_plain_decoding(drafter: Drafter) -> None:
    plain, engine = Decoder(TARGET, None, END), Decoder(TARGET, drafter, END)
    accepted = steps = 0
    for ids in PROMPTS:
        out = engine.generate(ids, params())
        assert out.ids == plain.generate(ids, params()).ids
        assert out.counter is not None
        accepted, steps = accepted + out.counter.accepted, steps + out.counter.steps
    assert accepted > 0.3 * steps, (accepted, steps)


def test_rows_after_decoding_equal_rows_of_a_fresh_prefill(drafter: Drafter) -> None:
    core = Decoder(TARGET, drafter, frozenset()).core
    check_rows_after_decoding(core, PROMPTS[0], params(1.0, 3))


def test_sampled_text_depends_on_the_seed_and_nothing_else(drafter: Drafter) -> None:
    engine = Decoder(TARGET, drafter, END)
    once = [engine.generate(ids, params(1.0, 5)).ids for ids in PROMPTS[:4]]
    assert once == [engine.generate(ids, params(1.0, 5)).ids for ids in PROMPTS[:4]]
    assert once != [engine.generate(ids, params(1.0, 6)).ids for ids in PROMPTS[:4]]
