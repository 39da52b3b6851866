"""Inside the vLLM environment: does vLLM's ``Qwen3DSparkForCausalLM`` understand our files?

Nothing of the model is replaced here: the CPU build runs this flavour, so the block goes through
vLLM's own attention, paged cache and heads (``engine_setup`` says what is mended beneath them).
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
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

BLOCK_TABLE_ROW = 1  # not 0, so that an ignored table would show


def attempts(model: nn.Module, config: VllmConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Our tensors in other company."""
    changed = {
        "unknown tensor": {**weights, "markov_head.gate_proj.weight": torch.zeros(1)},
        "model prefix": {f"model.{n}": t for n, t in weights.items()},
        "without embedding": without(weights, "embed_tokens.weight"),
        "missing norm": without(weights, "layers.0.self_attn.k_norm.weight"),
    }
    return {case: attempt(model, config, tensors) for case, tensors in changed.items()}


def attention_metadata(
    draft: nn.Module, config: VllmConfig, context: int, block: int
) -> tuple[dict[str, Any], Tensor]:
    """Allocate caches; metadata of one request with ``context`` rows and ``block`` queries."""
    layers = {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in draft.model.layers}
    first = next(iter(layers.values()))
    spec = first.get_kv_cache_spec(config)
    for attention in layers.values():
        shape = (2, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        attention.kv_cache = torch.zeros(shape, dtype=spec.dtype)
    slots = BLOCK_TABLE_ROW * spec.block_size + torch.arange(context + block)
    assert context + block <= spec.block_size
    start = torch.tensor([0, block], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor([context + block], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=block,
        max_query_len=block,
        max_seq_len=context + block,
        block_table_tensor=torch.tensor([[BLOCK_TABLE_ROW]], dtype=torch.int32),
        slot_mapping=slots[context:],
        causal=draft.get_draft_attn_causal()[0],
    )
    builder = first.attn_backend.get_builder_cls()(spec, list(layers), config, torch.device("cpu"))
    metadata = builder.build(0, common)
    return dict.fromkeys(layers, metadata), slots


@torch.inference_mode()
def one_block(draft: nn.Module, config: VllmConfig, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Final hidden states, logits before and after Markov, confidences of one block."""
    context, block = len(inputs["context_positions"]), len(inputs["block_ids"])
    metadata, slots = attention_metadata(draft, config, context, block)
    draft.precompute_and_store_context_kv(
        draft.combine_hidden_states(inputs["taps"].flatten(1)),
        inputs["context_positions"],
        slots[:context],
    )
    of_block = dict.fromkeys(metadata, slots[context:])
    with set_forward_context(metadata, config, num_tokens=block, slot_mapping=of_block):
        hidden = draft(inputs["block_ids"], inputs["block_positions"])
    logits = draft.compute_draft_logits(hidden)
    embedded = draft.markov_embed(inputs["previous_ids"])
    return {
        "hidden": hidden,
        "base_logits": logits,
        "logits": logits + draft.markov_bias(embedded),
        "confidence": draft.compute_confidence(hidden, embedded),
    }


def main() -> None:
    folder: Path = job_folder()
    let_v1_pass()
    mend_grouped_norm()
    config = engine_config(folder / "target", folder / "draft")
    with single_process(config):
        probe = build_poisoned(config)
        load_checked(probe, config)
        answer: dict[str, Any] = {
            "config": config_seen(config),
            "model_class": type(probe).__name__,
            "unloaded": unloaded(probe),
            "causal": probe.get_draft_attn_causal(),
            "kv_cache_layers": probe.get_draft_kv_cache_layer_names(),
        }
        weights = load_file(folder / "draft" / "model.safetensors")
        answer["attempts"] = attempts(probe, config, weights)
        config.compilation_config.static_forward_context.clear()
        target = get_model(vllm_config=config)
        draft = load_dspark_model(target, config)
        answer["shares_embedding"] = draft.model.embed_tokens is target.model.embed_tokens
        answer["shares_lm_head"] = draft.lm_head is target.lm_head
        outputs = one_block(draft, config, load_file(folder / "inputs.safetensors"))
    save_file({n: t.contiguous() for n, t in outputs.items()}, folder / "outputs.safetensors")
    write_answer(folder, answer)


if __name__ == "__main__":
    main()
