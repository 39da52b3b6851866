"""vLLM's own Qwen3 draft class accepts what dspark writes and computes what dspark computes.

The block runs through vLLM's model, paged cache and CPU attention in fp32, see ``judge_gqa.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_environment import Verdict, judge, loud, vllm_python

from dspark.checkpoint.draft import save_draft
from dspark.config.architecture import Qwen3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CONTEXT, ANCHOR_ID, TARGET_LAYERS, LAYERS = 11, 17, 8, 3
CONFIG = Qwen3DraftConfig(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,  # not hidden / heads, so that an engine's own default would show
    rms_norm_eps=1e-6,
    vocab_size=256,
    max_position_embeddings=2048,
    rope_parameters=RopeParameters(rope_theta=40_000.0),
    target_layer_ids=(0, 3, 6),
    target_num_hidden_layers=TARGET_LAYERS,
    target_hidden_size=128,
    mask_token_id=250,
    markov_rank=32,
)


@pytest.fixture(scope="module")
def draft() -> DSparkDraft:
    return loud(DSparkDraft(CONFIG))


def write_target(folder: Path, embedding: torch.Tensor) -> None:
    """A random Qwen3 whose embedding is the draft's, as in a real pair."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=192,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
    model.save_pretrained(folder)


def lm_head_of(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["lm_head.weight"]


@pytest.fixture(scope="module")
def inputs(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    previous = torch.randint(0, 250, (CONFIG.block_size,), generator=generator)
    previous[0] = ANCHOR_ID
    start = 1500
    return {
        "taps": torch.randn(CONTEXT, LAYERS, CONFIG.hidden_size, generator=generator),
        "context_positions": start + torch.arange(CONTEXT),
        "block_positions": start + CONTEXT + torch.arange(CONFIG.block_size),
        "block_ids": draft.block_ids(torch.tensor([ANCHOR_ID]))[0],
        "previous_ids": previous,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, draft: DSparkDraft) -> Path:
    vllm_python()
    folder = tmp_path_factory.mktemp("gqa")
    (folder / "draft").mkdir()
    save_draft(folder / "draft", draft, {"target": "tiny"}, torch.float32)
    write_target(folder / "target", draft.embed_tokens.weight)
    return folder


@pytest.fixture(scope="module")
def verdict(folder: Path, inputs: dict[str, torch.Tensor]) -> Verdict:
    return judge("judge_gqa.py", folder, inputs)


def test_vllm_reads_every_decision_from_our_config_as_meant(verdict: Verdict) -> None:
    seen = verdict.answer["config"]
    assert seen["config_class"] == "Qwen3Config"
    assert seen["method"] == "dspark"
    assert seen["num_speculative_tokens"] == CONFIG.block_size
    assert seen["lookahead_slots"] == CONFIG.block_size, "anchor-first: no extra slot"
    assert seen["aux_layers"] == [i + 1 for i in CONFIG.target_layer_ids]
    assert seen["mask_token"] == CONFIG.mask_token_id
    assert seen["uses_latent_cache"] is False
    assert seen["max_model_len"] == CONFIG.max_position_embeddings
    assert verdict.answer["causal"] == [False] * LAYERS


def test_no_field_of_our_config_is_changed_or_lost_in_vllm(verdict: Verdict) -> None:
    seen = verdict.answer["config"]["fields"]
    written = {k: v for k, v in CONFIG.to_json().items() if v is not None}
    # transformers keeps theta inside rope_parameters only.
    assert seen["rope_parameters"]["rope_theta"] == written.pop("rope_theta")
    assert {key: seen.get(key) for key in written} == written


def test_every_weight_of_ours_finds_its_place_and_none_is_left_over(verdict: Verdict) -> None:
    assert verdict.answer["model_class"] == "Qwen3DSparkForCausalLM"
    # A placeholder of vLLM's, and the head that is shared with the target.
    assert set(verdict.answer["unloaded"]) == {"model.mask_embedding", "lm_head.weight"}
    assert verdict.answer["shares_embedding"] is True
    assert verdict.answer["shares_lm_head"] is True
    layers = [f"model.layers.{TARGET_LAYERS + i}.self_attn.attn" for i in range(LAYERS)]
    assert verdict.answer["kv_cache_layers"] == layers


def test_unknown_names_are_refused_but_a_missing_one_passes_unseen(verdict: Verdict) -> None:
    """Which is why dspark checks completeness itself before it writes and when it reads."""
    attempts = verdict.answer["attempts"]
    assert "no module or parameter named" in attempts["unknown tensor"]["said"]
    assert "no module or parameter named" in attempts["model prefix"]["said"]
    assert attempts["without embedding"]["said"] == ""
    assert attempts["missing norm"]["said"] == ""
    assert "model.layers.0.self_attn.k_norm.weight" in attempts["missing norm"]["unloaded"]


@torch.no_grad()
def test_one_block_through_vllm_gives_our_states_logits_and_confidences(
    verdict: Verdict, draft: DSparkDraft, folder: Path, inputs: dict[str, torch.Tensor]
) -> None:
    context = draft.context(inputs["taps"].unsqueeze(0))
    rows = draft.context_rows(context, inputs["context_positions"].unsqueeze(0))
    block_ids, positions = (inputs[k].unsqueeze(0) for k in ("block_ids", "block_positions"))
    hidden = draft.backbone(block_ids, positions, rows, None)
    base = hidden @ lm_head_of(folder / "target").T
    features, embedded = draft.markov_head.block(inputs["previous_ids"].unsqueeze(0), hidden)
    ours = {
        "hidden": hidden[0],
        "base_logits": base[0],
        "logits": (base + draft.markov_head.markov_w2(features))[0],
        "confidence": torch.sigmoid(draft.confidence_head(hidden, embedded))[0],
    }
    for name, tensor in ours.items():
        difference = (verdict.outputs[name] - tensor).abs().max()
        assert difference <= 2e-4 * tensor.abs().max(), f"{name} differs by {difference}"
