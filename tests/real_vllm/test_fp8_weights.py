"""Checkpoints of `dspark quantize` in vLLM's own loader, and its names in two matchers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm_environment import Verdict, judge, vllm_python
from vllm_pairs import K3, QWEN3, TARGET_LAYERS, export, loud

from dspark.checkpoint.shards import WEIGHTS
from dspark.config.architecture import DraftConfig
from dspark.model.draft import DSparkDraft
from dspark.quantize.convert import quantize
from dspark.quantize.manifest import PtqManifest, read_ptq_manifest
from dspark.quantize.plan import make_plan
from dspark.quantize.recipe import CONTEXT_ROWS

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

FUSED = ("self_attn.fused_qkv_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj",
         "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")  # fmt: skip
OTHERS = ("model.context_proj", "model.context_kv_proj", "model.markov_head.markov_w1",
          "model.markov_head.markov_w2", "model.confidence_head.proj", "model.embed_tokens",
          "lm_head")  # fmt: skip


def names() -> list[str]:
    """Runtime names of a five-layer K3 draft: numbered from the target's depth, and from 0."""
    layers = [f"model.layers.{first + i}.{n}" for first in (93, 0) for i in range(5) for n in FUSED]
    return [*layers, *OTHERS]


def judged(config: DraftConfig, recipe: str, folder: Path) -> Verdict:
    vllm_python()
    export(folder, loud(DSparkDraft(config)))
    shutil.move(folder / "draft", folder / "source")
    quantize(make_plan(folder / "source", recipe), folder / "draft")
    (folder / "names.json").write_text(json.dumps(names()), encoding="utf-8")
    return judge("judge_fp8.py", folder)


def check_arrived(verdict: Verdict, folder: Path) -> PtqManifest:
    """Every module of the manifest holds the codes and scales of its linears, and no other does."""
    manifest, ours = read_ptq_manifest(folder / "draft"), load_file(folder / "draft" / WEIGHTS)
    theirs = {n.removesuffix(".weight") for n in verdict.outputs if n.endswith(".weight")}
    assert theirs == {f"model.{name}" for name in manifest.modules}
    for module, members in manifest.modules.items():
        codes = torch.cat([ours[f"{m}.weight"].view(torch.uint8) for m in members])
        scales = torch.cat([ours[f"{m}.weight_scale"] for m in members])
        assert verdict.outputs[f"model.{module}.weight"].equal(codes), module
        found: Tensor = verdict.outputs[f"model.{module}.weight_scale"]
        assert found.equal(scales), module
    return manifest


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verdict, Path]:
    folder = tmp_path_factory.mktemp("k3-phase1")
    return judged(K3, "phase1", folder), folder


def test_codes_and_scales_arrive_in_the_twenty_five_modules_of_vllm(
    k3: tuple[Verdict, Path],
) -> None:
    verdict, folder = k3
    assert len(check_arrived(verdict, folder).modules) == 25
    assert verdict.answer["unloaded"] == []
    assert verdict.answer["runtime"]["model.layers.4.mlp.down_proj"] == (
        f"model.layers.{TARGET_LAYERS + 4}.mlp.down_proj"
    )


def test_both_matchers_leave_the_same_modules_under_both_numberings(
    k3: tuple[Verdict, Path],
) -> None:
    verdict, _ = k3
    kept = {n for n in names() if n.endswith(FUSED[1:])}
    assert len(kept) == 50
    for found in verdict.answer["whole"].values():
        assert set(names()) - set(found) == kept


def test_no_pattern_can_be_dropped(k3: tuple[Verdict, Path]) -> None:
    verdict, _ = k3
    whole = verdict.answer["whole"]
    assert len(verdict.answer["without"]) == 7
    for pattern, found in verdict.answer["without"].items():
        for library in ("vllm", "compressed_tensors"):
            assert set(found[library]) < set(whole[library]), (pattern, library)


def test_phase_two_arrives_also_in_the_rows_of_all_layers(tmp_path: Path) -> None:
    verdict = judged(K3, "phase2", tmp_path)
    manifest = check_arrived(verdict, tmp_path)
    assert CONTEXT_ROWS in manifest.modules
    assert len(manifest.modules) == 25 + 5 + 2
    assert verdict.answer["unloaded"] == []


@pytest.mark.parametrize("recipe", ["phase1", "phase2"])
def test_the_qwen3_flavour_arrives_with_q_k_v_joined(tmp_path: Path, recipe: str) -> None:
    verdict = judged(QWEN3, recipe, tmp_path)
    manifest = check_arrived(verdict, tmp_path)
    assert len(manifest.modules) == 12 + (recipe == "phase2")
    # The target lends its head when the engine starts; our checkpoints do not hold it.
    assert verdict.answer["unloaded"] == ["lm_head.weight"]
