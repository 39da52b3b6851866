"""vLLM's own K3 draft (config class, registry, loader, forward) accepts what dspark writes.

The oracle is the real ``K3DSparkForCausalLM`` of the pinned vLLM, see ``judge_k3.py`` for the parts
that cannot run without a GPU. A wrong name, shape, transposition, rotary layout, YaRN factor,
softmax scale or norm placement in our export or in our model would show here.
"""

from __future__ import annotations

import pytest
import torch
from vllm_environment import Verdict, judge, vllm_python
from vllm_pairs import K3, TARGET_LAYERS, block_inputs, check_equal, export, loud, our_block

from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def draft() -> DSparkDraft:
    return loud(DSparkDraft(K3))


@pytest.fixture(scope="module")
def inputs(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    """The target has no weights here, so its lm_head is among the inputs."""
    lm_head = torch.randn(K3.vocab_size, K3.hidden_size, generator=torch.Generator().manual_seed(3))
    embedding = draft.embed_tokens.weight.detach()
    return {**block_inputs(draft), "lm_head": lm_head, "embedding": embedding}


@pytest.fixture(scope="module")
def verdict(
    draft: DSparkDraft,
    inputs: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Verdict:
    vllm_python()
    folder = tmp_path_factory.mktemp("k3")
    export(folder, draft)
    return judge("judge_k3.py", folder, inputs)


def test_vllm_reads_every_decision_from_our_config_as_meant(verdict: Verdict) -> None:
    seen = verdict.answer["config"]
    assert seen["config_class"] == "K3DSparkConfig"
    assert seen["method"] == "dspark"
    assert seen["num_speculative_tokens"] == K3.block_size
    assert seen["lookahead_slots"] == K3.block_size, "anchor-first: no extra slot"
    assert seen["aux_layers"] == [i + 1 for i in K3.target_layer_ids]
    assert seen["mask_token"] == K3.mask_token_id
    assert seen["uses_latent_cache"] is True
    assert seen["max_model_len"] == K3.max_position_embeddings


def test_no_field_of_our_config_is_changed_or_lost_in_vllm(verdict: Verdict) -> None:
    seen = verdict.answer["config"]["fields"]
    written = K3.to_json()
    # transformers keeps theta inside rope_parameters only.
    assert seen["rope_parameters"]["rope_theta"] == written.pop("rope_theta")
    assert {key: seen.get(key) for key in written} == written


def test_vllm_builds_its_k3_class_and_every_weight_of_ours_finds_its_place(
    verdict: Verdict, draft: DSparkDraft
) -> None:
    assert verdict.answer["model_class"] == "K3DSparkForCausalLM"
    assert verdict.answer["unloaded"] == []
    assert len(draft.state_dict()) == 68
    # vLLM stacks some, copies the kv_a rows once more and takes the embedding from the target.
    elements = sum(
        torch.Size(shape).numel()
        for name, shape in verdict.answer["shapes"].items()
        if "context_kv_proj" not in name
    )
    ours = sum(t.numel() for n, t in draft.state_dict().items() if n != "embed_tokens.weight")
    assert elements == ours


def test_draft_layers_are_numbered_from_the_depth_of_the_target(verdict: Verdict) -> None:
    expected = [f"model.layers.{TARGET_LAYERS + i}.self_attn" for i in range(5)]
    assert verdict.answer["kv_cache_layers"] == expected


def test_vllm_refuses_missing_and_unknown_names_and_takes_a_slim_file(verdict: Verdict) -> None:
    said = {case: attempt["said"] for case, attempt in verdict.answer["attempts"].items()}
    assert "not initialized from checkpoint" in said["missing norm"]
    assert "no module or parameter named" in said["unknown tensor"]
    assert "no module or parameter named" in said["model prefix"]
    assert said["missing embedding"] == ""
    assert said["own lm_head"] == ""


def test_one_block_through_vllm_gives_our_rows_states_logits_and_confidences(
    verdict: Verdict, draft: DSparkDraft, inputs: dict[str, torch.Tensor]
) -> None:
    assert len(verdict.outputs) == 5
    check_equal(verdict.outputs, our_block(draft, inputs, inputs["lm_head"]))


def test_the_cpu_build_still_norms_all_layers_with_the_first_layers_weights(
    verdict: Verdict,
) -> None:
    """When this fails, vLLM's CPU kernel is mended: delete ``mend_grouped_norm`` and this test."""
    assert verdict.answer["norm_defect"] > 0.5
