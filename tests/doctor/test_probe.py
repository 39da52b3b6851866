"""The measuring instrument agrees with training, and its rotary twins are what they claim to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.pretrained import read_config, read_model
from dspark.checkpoint.target import load_target
from dspark.config.architecture import (
    DraftConfig,
    K3DraftConfig,
    Qwen3DraftConfig,
    RopeParameters,
)
from dspark.config.recipe import TargetSection
from dspark.doctor.engine import example_of
from dspark.doctor.live import layers_to_tap
from dspark.doctor.probe import Convention, Probe, Score, beats, rotary_twin, yarn_twins
from dspark.hidden.disk import DiskStore
from dspark.model.draft import DSparkDraft
from dspark.model.hf_target import HFTarget
from dspark.model.init import initialise
from dspark.training.anchors import build_blocks
from dspark.training.step import Vocabulary, training_step

SHARED = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50, "max_position_embeddings": 64, "target_layer_ids": (0, 2),
    "target_num_hidden_layers": 5, "target_hidden_size": 32, "mask_token_id": 4, "markov_rank": 6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def k3(**changes) -> DraftConfig:
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8}
    return K3DraftConfig(**SHARED, **sizes, v_head_dim=5, **changes)


def qwen3(**changes) -> DraftConfig:
    return Qwen3DraftConfig(**SHARED, num_key_value_heads=2, head_dim=8, **changes)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def test_the_declared_convention_scores_what_the_trainer_measures(
    tiny_run: Path, tiny_target: Path
) -> None:
    """The same blocks through the trainer's own step: acceptance of every slot."""
    draft, _ = load_draft(tiny_run / "draft")
    loaded = load_target(TargetSection(source=str(tiny_target), max_context=256))
    head = loaded.build(()).head_weight()
    store = DiskStore(tiny_run / "states" / "records")
    record = store.get(store.ids()[0])
    prompt = int((~record.loss_mask.bool()).sum())
    example = example_of(loaded.build((0, 1, 2)), record.ids.tolist(), prompt)
    probe = Probe([example], head, 7)
    anchors = probe.examples[0][1]
    ours = probe.score(draft, Convention())
    out = training_step(
        draft, build_blocks([record], [anchors], 7), Vocabulary.of(head, None, torch.float32),
        coefficients=(0.1, 0.9, 1.0), decay=4.0, denominator=1.0, chunk=4096,
    )  # fmt: skip
    trained = out.stats.acceptance.view(len(anchors), 7)
    assert ours.slots[0] == pytest.approx(trained.mean(0).tolist(), abs=2e-5)
    length = float(1 + trained.cumprod(-1).sum(-1).mean())
    assert ours.length == pytest.approx(length, abs=2e-5)


def test_both_sides_of_the_norm_are_the_same_through_the_transformers_adapter(
    tiny_target: Path,
) -> None:
    loaded = load_target(TargetSection(source=str(tiny_target), max_context=256))
    ids = torch.randint(7, 50, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = example_of(loaded.build((0, 2)), ids, 4)
    model = read_model(loaded.files, read_config(loaded.files), torch.float32)
    theirs = example_of(HFTarget(model, (0, 2)), ids, 4)
    for name in ("final", "before"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-4)
    assert not torch.allclose(ours.final, ours.before, atol=0.1)
    assert ours.states.keys() == {-1, 0, 2}
    assert all(torch.allclose(s, theirs.states[i], atol=1e-4) for i, s in ours.states.items())


@pytest.mark.parametrize("config", [k3(), qwen3()], ids=["k3", "qwen3"])
def test_a_rotary_twin_computes_another_function_of_the_same_numbers(config: DraftConfig) -> None:
    draft = initialise(DSparkDraft(config), None, seed=1).eval()
    _, twin = rotary_twin(draft)
    ids = torch.tensor([[7, 4, 4]])
    rows = [torch.zeros(1, 0, config.row_width) for _ in range(2)]
    positions = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        a, b = (d.backbone(ids, positions, rows, None) for d in (draft, twin))
        still = torch.zeros_like(positions)
        c, d = (d.backbone(ids, still, rows, None) for d in (draft, twin))
    assert not torch.allclose(a, b, atol=1e-4), "pairs matter where tokens stand apart"
    assert torch.allclose(c, d, atol=1e-5), "and only there: the weights are the same"


def test_yarn_is_questioned_only_where_it_is_declared() -> None:
    plain = initialise(DSparkDraft(k3()), None, seed=1)
    assert yarn_twins(plain) == {}
    scaled = initialise(DSparkDraft(k3(rope_parameters=RopeParameters(**YARN))), None, seed=1)
    twins = yarn_twins(scaled)
    assert len(twins) == 2
    for twin in twins.values():
        assert twin.draft_layers[0].self_attn.scale != scaled.draft_layers[0].self_attn.scale


def test_neighbours_of_the_declared_layers_are_tapped_as_far_as_they_exist() -> None:
    assert layers_to_tap((2, 5), 8) == (1, 2, 3, 4, 5, 6)
    assert layers_to_tap((0, 6), 8) == (0, 1, 5, 6), "never the last layer, never a negative one"


def fits(*accepted: float) -> Score:
    """A score with these means of c, whatever its lengths."""
    return Score(tuple((c + 0.05, c - 0.05) for c in accepted), (1.0,) * len(accepted))


def test_a_better_fit_must_be_larger_than_chance() -> None:
    declared = fits(0.5, 0.7, 0.6, 0.8)
    assert beats(fits(0.56, 0.77, 0.65, 0.86), declared)
    assert not beats(fits(0.51, 0.71, 0.61, 0.81), declared), "a difference without a meaning"
    assert not beats(fits(0.99, 0.6, 0.8, 0.7), declared), "a mean that one example carries"
    good = fits(0.9, 0.92, 0.88, 0.91)
    assert beats(fits(0.916, 0.935, 0.897, 0.926), good), "a sixth of what a good draft loses"
    assert not beats(fits(0.905, 0.925, 0.885, 0.915), good), "a twentieth of it"
