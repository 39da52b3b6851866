"""vLLM's own Qwen3 draft class accepts what dspark writes and computes what dspark computes.

The block runs through vLLM's model, paged cache and CPU attention in fp32, see ``judge_gqa.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_environment import Verdict, judge, vllm_python
from vllm_pairs import QWEN3, TARGET_LAYERS, block_inputs, check_equal, export, loud, our_block

from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def draft() -> DSparkDraft:
    return loud(DSparkDraft(QWEN3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, draft: DSparkDraft) -> Path:
    vllm_python()
    folder = tmp_path_factory.mktemp("gqa")
    export(folder, draft)
    return folder


@pytest.fixture(scope="module")
def inputs(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    return block_inputs(draft)


@pytest.fixture(scope="module")
def verdict(folder: Path, inputs: dict[str, torch.Tensor]) -> Verdict:
    return judge("judge_gqa.py", folder, inputs)


def test_vllm_reads_every_decision_from_our_config_as_meant(verdict: Verdict) -> None:
    seen = verdict.answer["config"]
    assert seen["config_class"] == "Qwen3Config"
    assert seen["method"] == "dspark"
    assert seen["num_speculative_tokens"] == QWEN3.block_size
    assert seen["lookahead_slots"] == QWEN3.block_size, "anchor-first: no extra slot"
    assert seen["aux_layers"] == [i + 1 for i in QWEN3.target_layer_ids]
    assert seen["mask_token"] == QWEN3.mask_token_id
    assert seen["uses_latent_cache"] is False
    assert seen["max_model_len"] == QWEN3.max_position_embeddings
    assert verdict.answer["causal"] == [False] * QWEN3.num_hidden_layers


def test_no_field_of_our_config_is_changed_or_lost_in_vllm(verdict: Verdict) -> None:
    seen = verdict.answer["config"]["fields"]
    written = {k: v for k, v in QWEN3.to_json().items() if v is not None}
    # transformers keeps theta inside rope_parameters only.
    assert seen["rope_parameters"]["rope_theta"] == written.pop("rope_theta")
    assert {key: seen.get(key) for key in written} == written


def test_every_weight_of_ours_finds_its_place_and_none_is_left_over(verdict: Verdict) -> None:
    assert verdict.answer["model_class"] == "Qwen3DSparkForCausalLM"
    # A placeholder of vLLM's, and the head that is shared with the target.
    assert set(verdict.answer["unloaded"]) == {"model.mask_embedding", "lm_head.weight"}
    assert verdict.answer["shares_embedding"] is True
    assert verdict.answer["shares_lm_head"] is True
    layers = [
        f"model.layers.{TARGET_LAYERS + i}.self_attn.attn" for i in range(QWEN3.num_hidden_layers)
    ]
    assert verdict.answer["kv_cache_layers"] == layers


def test_unknown_names_are_refused_but_a_missing_one_passes_unseen(verdict: Verdict) -> None:
    """Which is why dspark checks completeness itself before it writes and when it reads."""
    attempts = verdict.answer["attempts"]
    assert "no module or parameter named" in attempts["unknown tensor"]["said"]
    assert "no module or parameter named" in attempts["model prefix"]["said"]
    assert attempts["without embedding"]["said"] == ""
    assert attempts["missing norm"]["said"] == ""
    assert "model.layers.0.self_attn.k_norm.weight" in attempts["missing norm"]["unloaded"]


def test_one_block_through_vllm_gives_our_states_logits_and_confidences(
    verdict: Verdict, draft: DSparkDraft, folder: Path, inputs: dict[str, torch.Tensor]
) -> None:
    lm_head = load_file(folder / "target" / "model.safetensors")["lm_head.weight"]
    assert len(verdict.outputs) == 4
    check_equal(verdict.outputs, our_block(draft, inputs, lm_head))
