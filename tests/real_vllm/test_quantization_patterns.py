"""The ignore patterns of the contract (section 8), read by vLLM with its own runtime names.

vLLM fuses projections and numbers draft layers from the target's depth, so a pattern can be right
for the checkpoint and wrong for the engine: then BF16 weights are read as FP8 or the other way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_environment import judge, vllm_python
from vllm_pairs import K3, QWEN3, TARGET_LAYERS, export, loud

from dspark.config.architecture import DraftConfig
from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
IGNORE = [
    r"re:.*context_proj$",
    r"re:.*context_kv_proj$",
    r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)$",
    r"re:.*markov_head.*",
    r"re:.*confidence_head.*",
    r"re:.*embed_tokens$",
    r"re:.*lm_head$",
]
FLOAT8, FLOAT32 = "torch.float8_e4m3fn", "torch.float32"


def modules_of(config: DraftConfig, ignore: list[str], folder: Path) -> dict[str, Any]:
    """vLLM's modules of a draft whose config.json asks for FP8."""
    vllm_python()
    export(folder, loud(DSparkDraft(config)))
    path = folder / "draft" / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": WEIGHTS,
                "input_activations": {**WEIGHTS, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ignore,
    }
    path.write_text(json.dumps(raw), encoding="utf-8")
    found: dict[str, Any] = judge("judge_quantization.py", folder).answer["modules"]
    return found


def quantized(modules: dict[str, Any]) -> set[str]:
    return {n for n, m in modules.items() if m["method"] == "CompressedTensorsLinearMethod"}


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return modules_of(K3, IGNORE, tmp_path_factory.mktemp("k3-fp8"))


def test_thirty_tensors_become_twenty_five_modules_and_nothing_else(k3: dict[str, Any]) -> None:
    of_layer = ["self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"]
    of_layer += ["mlp.gate_up_proj", "mlp.down_proj"]
    expected = {f"model.layers.{i}.{name}" for i in range(5) for name in of_layer}
    assert len(expected) == 25
    assert quantized(k3) == expected


def test_a_quantized_module_wants_e4m3_codes_and_one_fp32_scale_per_row(k3: dict[str, Any]) -> None:
    rows, columns = K3.num_attention_heads * 48, K3.q_lora_rank
    assert k3["model.layers.0.self_attn.q_b_proj"]["parameters"] == {
        "weight": [FLOAT8, [rows, columns]],
        "weight_scale": [FLOAT32, [rows, 1]],
    }


def test_runtime_names_count_from_the_target_and_the_cross_layer_projection_poses_as_fused(
    k3: dict[str, Any],
) -> None:
    first = f"model.layers.{TARGET_LAYERS}.self_attn"
    assert k3["model.layers.0.self_attn.q_b_proj"]["runtime_name"] == f"{first}.q_b_proj"
    assert k3["model.context_kv_proj"]["runtime_name"] == f"{first}.fused_qkv_a_proj"
    for module in k3.values():
        assert module["ignored"] is (module["method"] != "CompressedTensorsLinearMethod")


def test_patterns_with_checkpoint_names_alone_quantize_the_fused_projection_by_mistake(
    tmp_path: Path,
) -> None:
    """Why the contract lists runtime names too: vLLM has no fused mapping for the k3 flavour."""
    ignore = [pattern.replace("|fused_qkv_a_proj", "") for pattern in IGNORE]
    assert "model.layers.0.self_attn.fused_qkv_a_proj" in quantized(
        modules_of(K3, ignore, tmp_path)
    )


def test_the_qwen3_flavour_needs_one_more_pattern_for_its_context_projection(
    tmp_path: Path,
) -> None:
    modules = modules_of(QWEN3, [*IGNORE, r"re:.*\.fc$"], tmp_path)
    of_layer = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert quantized(modules) == {f"model.layers.{i}.{name}" for i in range(3) for name in of_layer}
