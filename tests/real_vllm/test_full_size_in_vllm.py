"""The published Kimi-K3 draft size, built by vLLM from our config.json on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from vllm_environment import Verdict, judge, vllm_python

from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft
from dspark.model.mla import LatentAttention

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

FULL = K3DraftConfig(
    hidden_size=7168,
    intermediate_size=14336,
    num_hidden_layers=5,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163_840,
    max_position_embeddings=1_048_576,
    rope_parameters=RopeParameters(
        rope_type="yarn",
        rope_theta=50_000.0,
        factor=32.0,
        original_max_position_embeddings=32_768,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    target_layer_ids=(2, 23, 47, 71, 89),
    target_num_hidden_layers=93,
    target_hidden_size=7168,
    mask_token_id=163_837,
    markov_rank=256,
)


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    vllm_python()
    folder = tmp_path_factory.mktemp("full")
    write_config(folder / "draft", FULL.to_json())
    # Of the target vLLM's draft module asks depth, vocabulary and length only.
    target = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "first_k_dense_replace": 93,
        "vocab_size": 163_840,
        "max_position_embeddings": 1_048_576,
    }
    write_config(folder / "target", target)
    return judge("judge_full_size.py", folder)


def write_config(folder: Path, fields: dict[str, object]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def test_vllm_wants_exactly_the_parameters_of_our_full_size_draft(verdict: Verdict) -> None:
    with torch.device("meta"):
        ours = {n: t.numel() for n, t in DSparkDraft(FULL).state_dict().items()}
    assert (len(ours), sum(ours.values())) == (68, 3_562_312_961)
    theirs = {n: torch.Size(s).numel() for n, s in verdict.answer["shapes"].items()}
    copies = theirs.pop("model.context_kv_proj.weight")
    assert copies == 5 * 576 * 7168
    assert sum(theirs.values()) == 2_387_907_841 == sum(ours.values()) - ours["embed_tokens.weight"]


def test_its_layers_are_layers_93_to_97_of_the_targets_cache(verdict: Verdict) -> None:
    assert verdict.answer["kv_cache_layers"] == [
        f"model.layers.{93 + i}.self_attn" for i in range(5)
    ]
    assert verdict.answer["row_width"] == FULL.row_width == 576


def test_softmax_scale_and_rotary_table_fit_the_whole_context(verdict: Verdict) -> None:
    with torch.device("meta"):
        attention = DSparkDraft(FULL).draft_layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    assert verdict.answer["softmax_scale"] == pytest.approx(attention.scale, rel=1e-12)
    assert verdict.answer["rotary_rows"] >= FULL.max_position_embeddings
