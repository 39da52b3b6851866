"""Tiny random targets on disk, as transformers or llama.cpp would have written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": len(tiny_model.SPECIAL) + len(tiny_model.CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def made_model(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.5)
    return model


def saved(path: Path, kind: str = "llama", **fields: Any) -> Path:
    """A folder as ``save_pretrained`` leaves it, with the character tokenizer."""
    made_model(kind, **fields).save_pretrained(path)
    tiny_model.make_tokenizer().save_pretrained(path)
    return path


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def write_gguf(
    path: Path,
    model: Any,
    *,
    scaling: str | None = None,
    extra: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Path:
    """``model`` in fp32 with the layout llama.cpp's converter gives it, and a small tokenizer."""
    from gguf import GGUFWriter

    c = model.config
    heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
    writer = GGUFWriter(path, c.model_type)
    sizes = {
        "context_length": lambda: writer.add_context_length(c.max_position_embeddings),
        "embedding_length": lambda: writer.add_embedding_length(c.hidden_size),
        "block_count": lambda: writer.add_block_count(c.num_hidden_layers),
        "feed_forward_length": lambda: writer.add_feed_forward_length(c.intermediate_size),
        "head_count": lambda: writer.add_head_count(c.num_attention_heads),
        "head_count_kv": lambda: writer.add_head_count_kv(c.num_key_value_heads),
        "eps": lambda: writer.add_layer_norm_rms_eps(c.rms_norm_eps),
        "theta": lambda: writer.add_rope_freq_base(c.rope_parameters["rope_theta"]),
        "key_length": lambda: writer.add_key_length(model.model.layers[0].self_attn.head_dim),
    }
    for name, add in sizes.items():
        if name not in without:
            add()
    if c.model_type == "llama":
        writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    if scaling is not None:
        writer.add_string(f"{c.model_type}.rope.scaling.type", scaling)
    tokens = [*tiny_model.SPECIAL, *tiny_model.CHARACTERS]
    writer.add_tokenizer_model("gpt2")
    spelled = {" ": "Ġ", ":": "ha", ";": "ge"}  # what the merges below make must be tokens
    writer.add_token_list([spelled.get(t, t) for t in tokens])
    writer.add_token_types([3] * len(tiny_model.SPECIAL) + [1] * len(tiny_model.CHARACTERS))
    writer.add_token_merges(["h a", "g e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tiny_model.TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name in left_out or (name == "lm_head.weight" and c.tie_word_embeddings):
            continue
        array = tensor.numpy()
        for part, count in heads.items():
            if c.model_type == "llama" and f".{part}_proj." in name:
                halves = array.reshape(count, 2, -1, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    for name in extra:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
