"""Inside the vLLM environment: does vLLM's own K3 DSpark draft understand our files?

The real ``K3DSparkForCausalLM`` is built on the CPU, our weights go through vLLM's loader, and one
block is run through its forward. Only what cannot run without a GPU is replaced:

* the cache write and the attention kernel (``_GroupedCacheWrite``, ``attention``): rows are kept in
  a list instead of a paged cache, attention is the textbook formula over them, with vLLM's own
  projections, norms, rotary table and softmax scale;
* the attention's own post-processing of ``kv_b_proj`` for that kernel, and a question to CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_setup import (
    engine_config,
    job_folder,
    let_v1_pass,
    mend_grouped_norm,
    single_process,
    write_answer,
)
from loading import attempt, build_poisoned, config_seen, load_checked, unloaded, without
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.models.kimi_k3.nvidia import dspark_mla
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.v1.worker.workspace import init_workspace_manager


def attempts(model: nn.Module, config: VllmConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Our tensors in other company."""
    changed = {
        "missing norm": without(weights, "layers.0.self_attn.kv_a_layernorm.weight"),
        "missing embedding": without(weights, "embed_tokens.weight"),
        "unknown tensor": {**weights, "markov_head.gate_proj.weight": torch.zeros(1)},
        "model prefix": {f"model.{n}": t for n, t in weights.items()},
        "own lm_head": {**weights, "lm_head.weight": torch.zeros(1)},
    }
    return {case: attempt(model, config, tensors) for case, tensors in changed.items()}


class GroupedCacheWrite:
    """Stands where vLLM writes all layers' context rows into the paged cache."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def __call__(self, latent: Tensor, roped: Tensor, *ignored: Any) -> None:
        """latent [layers, T, kv_lora] normalised, roped [layers, T, rope] rotated."""
        self.rows = torch.cat([latent, roped], dim=-1)


def attention(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """MLA over ``self.context`` [T, row] and the block itself, both directions, in plain torch."""
    projected = self.fused_qkv_a_proj(hidden_states)[0]
    widths = [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim]
    query, latent, key_rope = projected.split(widths, dim=-1)
    query = self.q_b_proj(self.q_a_layernorm(query))[0]
    query = query.view(-1, self.num_heads, self.qk_head_dim)
    nope, roped = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    roped, key_rope = self.rotary_emb.forward_native(positions, roped, key_rope.unsqueeze(1))
    rows = torch.cat([self.kv_a_layernorm(latent), key_rope.squeeze(1)], dim=-1)
    rows = torch.cat([self.context, rows])
    expanded = self.kv_b_proj(rows[:, : self.kv_lora_rank].contiguous())[0]
    expanded = expanded.view(len(rows), self.num_heads, -1)
    key, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", nope, key)
    scores += torch.einsum("qhd,kd->hqk", roped, rows[:, self.kv_lora_rank :])
    weights = torch.softmax(scores * self.scale, dim=-1)
    return self.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))[0]


@torch.inference_mode()
def one_block(model: nn.Module, config: VllmConfig, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Context rows, final hidden states, logits before and after Markov, confidences."""
    init_workspace_manager(torch.device("cpu"))
    model.model.embed_tokens = nn.Embedding.from_pretrained(inputs["embedding"])
    model.lm_head = ParallelLMHead(*inputs["lm_head"].shape)
    model.lm_head.weight.copy_(inputs["lm_head"])
    torch.cuda.is_current_stream_capturing = lambda: False
    MultiHeadLatentAttention.process_weights_after_loading = lambda self, dtype: None
    draft = config.speculative_config.draft_model_config
    process_weights_after_loading(model, draft, torch.device("cpu"))
    write = GroupedCacheWrite()
    dspark_mla.ops.concat_and_cache_mla_grouped = write
    MultiHeadLatentAttention.forward = attention
    taps = inputs["taps"].flatten(1)
    for layer in model.model.layers:
        layer.self_attn.kv_cache = torch.zeros(1, 1, layer.self_attn.head_size)
    model.precompute_and_store_context_kv(
        model.combine_hidden_states(taps), inputs["context_positions"], inputs["context_positions"]
    )
    for layer, rows in zip(model.model.layers, write.rows, strict=True):
        layer.self_attn.context = rows
    hidden = model(inputs["block_ids"], inputs["block_positions"])
    embedded = model.markov_embed(inputs["previous_ids"])
    logits = model.compute_draft_logits(hidden)
    return {
        "context_rows": write.rows,
        "hidden": hidden,
        "base_logits": logits,
        "logits": logits + model.markov_bias(embedded),
        "confidence": model.compute_confidence(hidden, embedded),
    }


def main() -> None:
    folder: Path = job_folder()
    let_v1_pass()
    norm_defect = mend_grouped_norm()
    config = engine_config(folder / "target", folder / "draft")
    with single_process(config):
        model = build_poisoned(config)
        load_checked(model, config)
        answer = {
            "config": config_seen(config),
            "norm_defect": norm_defect,
            "model_class": type(model).__name__,
            "unloaded": unloaded(model),
            "shapes": {n: list(p.shape) for n, p in model.named_parameters()},
            "kv_cache_layers": model.get_draft_kv_cache_layer_names(),
        }
        weights = load_file(folder / "draft" / "model.safetensors")
        write_answer(folder, {**answer, "attempts": attempts(model, config, weights)})
        load_checked(model, config)
        outputs = one_block(model, config, load_file(folder / "inputs.safetensors"))
        save_file({n: t.contiguous() for n, t in outputs.items()}, folder / "outputs.safetensors")


if __name__ == "__main__":
    main()
