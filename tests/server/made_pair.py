"""A target and a draft that need no training: the draft knows nearly everything by construction.

The target's layers hardly disturb the residual stream, so that the next token is mostly a function
of the last one: ``head @ norm(embedding)``. The draft's backbone says nothing and its Markov head
holds exactly these two factors, so a good part of what it drafts is accepted, and the rest is
refused, which is where the context mattered. Tokens are bytes and a few pairs: half characters,
stop strings across tokens and JSON all occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.draft import save_draft
from dspark.checkpoint.target import load_target
from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.config.recipe import TargetSection
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.pairing import target_identity

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<user>", "<assistant>", "<system>"]
PAIRS = ["th", "he", "an", "in", "er", "on", "re", "at", "en", "or", '":', '",', '{"', '"}']
WORDS = [("th", "e"), ("an", "d"), ("in", "g")]
END = SPECIAL.index("<eos>")
CONTEXT, BLOCK = 512, 7
TEMPLATE = (
    "<bos>{% if reasoning_effort %}<system>effort {{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}<system>thinking {{ enable_thinking }}{% endif %}"
    "{% for d in documents or [] %}<system>{{ d.title }}: {{ d.text }}{% endfor %}"
    "{% if tools %}<system>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ 'user' if m.role == 'tool' else m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(pair[0], pair[1]) for pair in PAIRS] + WORDS
    tokens = [*SPECIAL, *alphabet, *PAIRS, *("".join(p) for p in WORDS)]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _scales(tokenizer: Any) -> torch.Tensor:
    """How readily each token is said [V]: letters and JSON often, odd bytes seldom."""
    scale = torch.full((len(tokenizer), 1), 0.12)
    for i in range(len(SPECIAL), len(tokenizer)):
        text = tokenizer.decode([i])
        if text.isascii() and text.isprintable():
            scale[i] = 0.55
        elif text == "\ufffd":
            scale[i] = 0.3
    scale[END] = 0.45
    return scale


def make(folder: Path, hidden: int = 64, layers: int = 4) -> tuple[Path, Path]:
    """Write (target, draft) folders below ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 3 // 2,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=CONTEXT, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=END, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.35)
        model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.normal_(0, 8 * hidden**-0.5).mul_(_scales(tokenizer))
    model.generation_config.eos_token_id = END
    target = folder / "target"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    loaded = load_target(TargetSection(source=str(target), max_context=CONTEXT, device="cpu"))
    provenance = {"target": str(target), **target_identity(loaded)}
    return target, _draft(folder / "draft", model, len(tokenizer), provenance)


def _draft(folder: Path, model: Any, size: int, provenance: dict[str, Any]) -> Path:
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    config = K3DraftConfig(
        hidden_size=hidden, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        vocab_size=size, max_position_embeddings=CONTEXT, rope_parameters=RopeParameters(),
        target_layer_ids=(0, 1), target_num_hidden_layers=layers, target_hidden_size=hidden,
        mask_token_id=SPECIAL.index("<mask>"), markov_rank=hidden, block_size=BLOCK,
    )  # fmt: skip
    draft = initialise(DSparkDraft(config), None, 0)
    embedding = model.model.embed_tokens.weight.detach()
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(embedding)
        draft.final_norm.weight.fill_(1e-4)
        normed = embedding * torch.rsqrt(embedding.square().mean(-1, keepdim=True) + 1e-6)
        draft.markov_head.markov_w1.weight.copy_(normed)
        draft.markov_head.markov_w2.weight.copy_(model.lm_head.weight)
    folder.mkdir(parents=True)
    save_draft(folder, draft, provenance, torch.float32)
    return folder
