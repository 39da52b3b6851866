"""vLLM's own K3 draft (config class, registry, loader, forward) accepts what dspark writes.

The oracle is the real ``K3DSparkForCausalLM`` of the pinned vLLM, see ``judge_k3.py`` for the parts
that cannot run without a GPU. A wrong name, shape, transposition, rotary layout, YaRN factor,
softmax scale or norm placement in our export or in our model would show here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_environment import Verdict, judge, loud, vllm_python

from dspark.checkpoint.draft import save_draft
from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CONTEXT, ANCHOR_ID, TARGET_LAYERS = 11, 17, 8
CONFIG = K3DraftConfig(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=5,
    num_attention_heads=4,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
    vocab_size=256,
    max_position_embeddings=2048,
    rope_parameters=RopeParameters(
        rope_type="yarn",
        rope_theta=50_000.0,
        factor=32.0,
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    target_layer_ids=(0, 1, 3, 5, 6),
    target_num_hidden_layers=TARGET_LAYERS,
    target_hidden_size=128,
    mask_token_id=250,
    markov_rank=32,
)


def write_target_config(folder: Path) -> None:
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=192,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=TARGET_LAYERS,
        max_position_embeddings=2048,
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def draft() -> DSparkDraft:
    return loud(DSparkDraft(CONFIG))


@pytest.fixture(scope="module")
def inputs(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    """A context of tapped states and the block after it, far enough for YaRN to matter."""
    generator = torch.Generator().manual_seed(1)
    start = 1500
    block = torch.arange(CONFIG.block_size)
    previous = torch.randint(0, 250, (CONFIG.block_size,), generator=generator)
    previous[0] = ANCHOR_ID
    return {
        "taps": torch.randn(CONTEXT, 5, CONFIG.hidden_size, generator=generator),
        "context_positions": start + torch.arange(CONTEXT),
        "block_positions": start + CONTEXT + block,
        "block_ids": draft.block_ids(torch.tensor([ANCHOR_ID]))[0],
        "previous_ids": previous,
        "embedding": draft.embed_tokens.weight.detach(),
        "lm_head": torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator) * 0.1,
    }


@pytest.fixture(scope="module")
def verdict(
    draft: DSparkDraft,
    inputs: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Verdict:
    vllm_python()
    folder = tmp_path_factory.mktemp("k3")
    (folder / "draft").mkdir()
    save_draft(folder / "draft", draft, {"target": "tiny"}, torch.float32)
    write_target_config(folder / "target")
    return judge("judge_k3.py", folder, inputs)


def test_vllm_reads_every_decision_from_our_config_as_meant(verdict: Verdict) -> None:
    seen = verdict.answer["config"]
    assert seen["config_class"] == "K3DSparkConfig"
    assert seen["method"] == "dspark"
    assert seen["num_speculative_tokens"] == CONFIG.block_size
    assert seen["lookahead_slots"] == CONFIG.block_size, "anchor-first: no extra slot"
    assert seen["aux_layers"] == [i + 1 for i in CONFIG.target_layer_ids]
    assert seen["mask_token"] == CONFIG.mask_token_id
    assert seen["uses_latent_cache"] is True
    assert seen["max_model_len"] == CONFIG.max_position_embeddings


def test_no_field_of_our_config_is_changed_or_lost_in_vllm(verdict: Verdict) -> None:
    seen = verdict.answer["config"]["fields"]
    written = CONFIG.to_json()
    # transformers keeps theta inside rope_parameters only.
    assert seen["rope_parameters"]["rope_theta"] == written.pop("rope_theta")
    assert {key: seen.get(key) for key in written} == written


def test_vllm_builds_its_k3_class_and_every_weight_of_ours_finds_its_place(
    verdict: Verdict, draft: DSparkDraft
) -> None:
    assert verdict.answer["model_class"] == "K3DSparkForCausalLM"
    assert verdict.answer["unloaded"] == []
    assert len(draft.state_dict()) == 68
    # vLLM stacks some of them and takes the embedding from the target.
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


@torch.no_grad()
def test_one_block_through_vllm_gives_our_rows_states_logits_and_confidences(
    verdict: Verdict, draft: DSparkDraft, inputs: dict[str, torch.Tensor]
) -> None:
    context = draft.context(inputs["taps"].unsqueeze(0))
    rows = draft.context_rows(context, inputs["context_positions"].unsqueeze(0))
    block_ids, positions = (inputs[k].unsqueeze(0) for k in ("block_ids", "block_positions"))
    hidden = draft.backbone(block_ids, positions, rows, None)
    previous = inputs["previous_ids"].unsqueeze(0)
    base = hidden @ inputs["lm_head"].T
    features, embedded = draft.markov_head.block(previous, hidden)
    ours = {
        "context_rows": torch.cat(rows),
        "hidden": hidden[0],
        "base_logits": base[0],
        "logits": (base + draft.markov_head.markov_w2(features))[0],
        "confidence": torch.sigmoid(draft.confidence_head(hidden, embedded))[0],
    }
    for name, tensor in ours.items():
        theirs = verdict.outputs[name]
        torch.testing.assert_close(
            theirs, tensor, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
