"""FP8 drafts in the engine: the text is the target's, and acceptance is the float draft's, nearly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.checkpoint.draft import load_draft, save_draft
from dspark.config.architecture import Flavour
from dspark.decoding.acceptance import difference_interval
from dspark.decoding.params import SamplingParams
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.model.draft import DSparkDraft
from dspark.model.fp8 import Fp8Form, FP8Linear
from dspark.model.layers import PackedLinear
from dspark.quantize.compare import Sample, compare
from dspark.quantize.convert import quantize
from dspark.quantize.plan import make_plan
from dspark.training.stage import train_draft
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
RECORDS = tiny_records(TARGET, 24)
PROMPTS = [record.ids[:4].tolist() for record in RECORDS]


@dataclass(frozen=True)
class Checkpoints:
    """Folders of one trained draft: bfloat16, and each recipe."""

    folder: Path

    def load(self, name: str, form: Fp8Form = "dequantized") -> DSparkDraft:
        return load_draft(self.folder / name, fp8=form)[0]

    def decoder(self, name: str, form: Fp8Form = "dequantized") -> Decoder:
        return Decoder(TARGET, Drafter(self.load(name, form), TARGET.head_weight()), END)


@pytest.fixture(scope="module", params=["k3", "qwen3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    flavour: Flavour = request.param
    folder: Path = tmp_path_factory.mktemp(flavour)
    section = tiny_section(epochs=30.0, learning_rate=6e-3, num_anchors=16, eval_every=1000)
    trained = train_draft(
        tiny_config("vanilla", flavour),
        target_parts(TARGET),
        RECORDS,
        section,
        folder,
        vocabulary_size=None,
    )
    (folder / "float").mkdir()
    save_draft(folder / "float", trained.draft, {"target": "tiny"}, torch.bfloat16)
    for recipe in ("phase1", "phase2"):
        quantize(make_plan(folder / "float", recipe), folder / recipe)
    return Checkpoints(folder)


def params(temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_new_tokens=24)


def counts(decoder: Decoder, temperature: float) -> tuple[list[tuple[int, int]], list[list[int]]]:
    done = [decoder.generate(ids, params(temperature, 5)) for ids in PROMPTS]
    return [(d.counter.accepted, d.counter.steps) for d in done if d.counter], [d.ids for d in done]


def test_text_is_the_targets_and_acceptance_nearly_the_float_drafts(made: Checkpoints) -> None:
    plain = Decoder(TARGET, None, END)
    texts = [plain.generate(ids, params()).ids for ids in PROMPTS]
    before, same = counts(made.decoder("float"), 0.0)
    assert same == texts
    assert sum(a for a, _ in before) > 0.3 * sum(s for _, s in before)
    for recipe in ("phase1", "phase2"):
        for form in ("dequantized", "reference"):
            after, same = counts(made.decoder(recipe, form), 0.0)
            assert same == texts, (recipe, form)
            change, low, high = difference_interval(before, after, seed=0)
            print(f"{recipe} {form}: {change:+.3f} ({low:+.3f} to {high:+.3f})")
            assert abs(change) < 0.35, (recipe, form)
            assert low <= change <= high


def test_sampled_acceptance_holds_as_well(made: Checkpoints) -> None:
    before, _ = counts(made.decoder("float"), 1.0)
    after, _ = counts(made.decoder("phase1"), 1.0)
    change, low, high = difference_interval(before, after, seed=0)
    assert abs(change) < 0.5, (change, low, high)


def test_forms_are_what_they_are_called(made: Checkpoints) -> None:
    """Dequantized linears are packed for the CPU; FP8 ones stay FP8 in the engine."""
    plain = made.decoder("phase1").core
    codes = made.decoder("phase2", "reference").core

    def kinds(core: object, kind: type) -> int:
        draft = core.runner.drafter.draft  # type: ignore[attr-defined]
        return sum(isinstance(m, kind) for m in draft.modules())

    assert kinds(plain, FP8Linear) == 0
    assert kinds(codes, FP8Linear) == len(make_plan(made.folder / "float", "phase2").fp8)
    if torch.backends.mkldnn.is_available():
        assert kinds(plain, PackedLinear) > 0


def samples() -> list[Sample]:
    return [Sample(r.ids, r.taps, [4, 6]) for r in RECORDS[:8]]


def head() -> Tensor:
    return TARGET.head_weight()


def test_errors_of_modules_and_logits_are_those_of_three_mantissa_bits(made: Checkpoints) -> None:
    draft = made.load("float")
    fp8 = {name.removesuffix(".weight") for name in make_plan(made.folder / "float", "phase1").fp8}
    same = compare(draft, made.load("float"), head(), samples())
    assert (same.modules, same.kl, same.agreement, same.confidence_difference) == ({}, 0, 1, 0)
    assert same.slots == 16 * draft.config.block_size
    weights_only = compare(draft, made.load("phase1"), head(), samples())
    both = compare(draft, made.load("phase1", "reference"), head(), samples())
    for found in (weights_only, both):
        assert set(found.modules) == fp8
        assert all(0.003 < error < 0.08 for error in found.modules.values()), found.modules
        assert 0 < found.kl < 0.2
        assert found.cosine > 0.99
        assert found.agreement > 0.8
    mean = {id(f): sum(f.modules.values()) / len(f.modules) for f in (weights_only, both)}
    assert mean[id(both)] > 1.15 * mean[id(weights_only)]  # activations are rounded as well
