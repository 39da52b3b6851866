"""Tiny pairs of target and draft on disk, one of each flavour, for vLLM to read.

Sizes are odd on purpose: no two dimensions agree unless they must, so that a transposition or an
engine's own default cannot fit by accident.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dspark.checkpoint.draft import save_draft
from dspark.config.architecture import (
    DraftConfig,
    K3DraftConfig,
    Qwen3DraftConfig,
    RopeParameters,
)
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise

CONTEXT, START, ANCHOR_ID, TARGET_LAYERS = 11, 1500, 17, 8
K3 = K3DraftConfig(
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
    # START lies far beyond 64 positions, so that YaRN matters.
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
QWEN3 = Qwen3DraftConfig(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,  # not hidden / heads
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


def loud(draft: DSparkDraft) -> DSparkDraft:
    """No parameter at a neutral start: a norm or a head that an engine skips changes the numbers."""
    initialise(draft, None, 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return draft.eval()


def export(folder: Path, draft: DSparkDraft) -> None:
    """Draft and target of its family below ``folder``; the target shares the draft's embedding."""
    (folder / "draft").mkdir(parents=True)
    save_draft(folder / "draft", draft, {"target": "tiny"}, torch.float32)
    if isinstance(draft.config, K3DraftConfig):
        write_latent_target(folder / "target")
    else:
        write_qwen3_target(folder / "target", draft.embed_tokens.weight)


def write_latent_target(folder: Path) -> None:
    """Only the config of a dense MLA target: vLLM cannot run the k3 flavour on a CPU anyway."""
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=K3.vocab_size,
        hidden_size=K3.hidden_size,
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


def write_qwen3_target(folder: Path, embedding: Tensor) -> None:
    """A random Qwen3 with weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=QWEN3.vocab_size,
        hidden_size=QWEN3.hidden_size,
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


def block_inputs(draft: DSparkDraft) -> dict[str, Tensor]:
    """Tapped states of a context, and the block that follows it."""
    config: DraftConfig = draft.config
    generator = torch.Generator().manual_seed(1)
    previous = torch.randint(0, 250, (config.block_size,), generator=generator)
    previous[0] = ANCHOR_ID
    taps = (CONTEXT, len(config.target_layer_ids), config.hidden_size)
    return {
        "taps": torch.randn(taps, generator=generator),
        "context_positions": START + torch.arange(CONTEXT),
        "block_positions": START + CONTEXT + torch.arange(config.block_size),
        "block_ids": draft.block_ids(torch.tensor([ANCHOR_ID]))[0],
        "previous_ids": previous,
    }


@torch.no_grad()
def our_block(draft: DSparkDraft, inputs: dict[str, Tensor], lm_head: Tensor) -> dict[str, Tensor]:
    """What dspark makes of ``inputs``: rows per layer, then everything slot by slot."""
    context = draft.context(inputs["taps"].unsqueeze(0))
    rows = draft.context_rows(context, inputs["context_positions"].unsqueeze(0))
    block_ids, positions = (inputs[k].unsqueeze(0) for k in ("block_ids", "block_positions"))
    hidden = draft.backbone(block_ids, positions, rows, None)
    base = hidden @ lm_head.T
    features, embedded = draft.markov_head.block(inputs["previous_ids"].unsqueeze(0), hidden)
    return {
        "context_rows": torch.cat(rows),
        "hidden": hidden[0],
        "base_logits": base[0],
        "logits": (base + draft.markov_head.markov_w2(features))[0],
        "confidence": torch.sigmoid(draft.confidence_head(hidden, embedded))[0],
    }


def check_equal(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """fp32 equality up to the order of sums, for everything that vLLM gave."""
    for name, tensor in theirs.items():
        difference = (tensor - ours[name]).abs().max()
        assert difference <= 2e-4 * ours[name].abs().max(), f"{name} differs by {difference}"
