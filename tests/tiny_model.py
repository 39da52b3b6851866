"""A real, tiny MLA target trained on the spot: sums spelt out character by character.

Run as a script to (re)make it: ``python tests/tiny_model.py FOLDER``. It is a Hugging Face
DeepSeek-V3 made dense, with a character tokenizer and a chat template, so the whole product can run
on it in seconds. It exercises machinery; its figures mean nothing.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<user>", "<assistant>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+=:;,. "
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% else %}<user>"
    "{% endif %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MASK_ID = SPECIAL.index("<mask>")
LAYERS = 4


def question(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    name = rng.choice(["tom", "mia", "ben"])
    text = f"{name} has {a} and gets {b}"
    return text, f"{name} has {a}+{b}={a + b}. so {name} has {a + b} in all."


def make_tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    raw.add_special_tokens(SPECIAL)
    from tokenizers import decoders

    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=LAYERS,
        max_position_embeddings=256,
        rope_scaling=None,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config)


def train_target(model, tokenizer, steps: int = 220) -> float:
    """A few hundred steps of next-character prediction; returns the last loss."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for step in range(steps):
        texts = []
        for _ in range(32):
            user, assistant = question(rng)
            messages = [{"role": "user", "content": user},
                        {"role": "assistant", "content": assistant}]  # fmt: skip
            texts.append(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        length = max(map(len, texts))
        ids = torch.tensor([t + [0] * (length - len(t)) for t in texts])
        labels = ids.masked_fill(ids == 0, -100)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def make(folder: Path) -> float:
    """Train and save target and tokenizer into ``folder``."""
    tokenizer, model = make_tokenizer(), make_model()
    loss = train_target(model, tokenizer)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


if __name__ == "__main__":
    print(f"loss {make(Path(sys.argv[1])):.3f}")
