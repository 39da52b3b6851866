"""Small targets and answers for capture, and the target's forward written out by hand.

:func:`by_hand` shares no code with the decoder: float64, one sequence, loops over heads. A tap at
the wrong layer, a norm too many or a position off by one cannot hide in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dspark.config.architecture import RopeParameters
from dspark.config.target import TargetConfig
from dspark.hidden.answers import Answer
from dspark.model.target import DecoderTarget

TAPS = (0, 2)
VOCAB = 97


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Import me: these matrices are tiny, and on a busy machine a second thread only waits.

    It also fixes the order of sums, which bit-for-bit comparisons between processes stand on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_target(attention: Literal["gqa", "mla"] = "gqa") -> DecoderTarget:
    latent: dict[str, Any] = {}
    if attention == "mla":
        latent = {
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        }
    config = TargetConfig(
        attention=attention,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2 if attention == "gqa" else 4,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters=RopeParameters(rope_theta=10_000.0),
        **latent,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = DecoderTarget(config, TAPS)
        with torch.no_grad():
            target.final_norm.weight.uniform_(0.3, 2.0)
            for name, parameter in target.named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.uniform_(0.5, 1.5)
            target.head_weight().normal_(0, 0.8)
    return target.eval().requires_grad_(False)


def make_answers(count: int, *, shared: int, seed: int = 0) -> list[Answer]:
    """Prompts that begin with the same ``shared`` tokens; lengths differ."""
    g = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=g))
        drawn: list[int] = torch.randint(0, VOCAB, (size,), generator=g).tolist()
        return drawn

    common = torch.randint(0, VOCAB, (shared,), generator=g).tolist()
    answers = []
    for i in range(count):
        # The first own token differs, so that exactly ``shared`` tokens are common to all.
        prompt = [*common, i, *tokens(1, 8)]
        answers.append(
            Answer(
                id=f"a-{i:02d}",
                category="maths",
                temperature=float(i % 2),
                prompt_length=len(prompt),
                finish_reason="stop",
                ids=(*prompt, *tokens(2, 14)),
            )
        )
    return answers


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight.double()


def _turn(x: Tensor, position: int) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of one head's vector."""
    out = x.clone()
    for pair in range(len(x) // 2):
        angle = position / 10_000.0 ** (2 * pair / len(x))
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def by_hand(target: DecoderTarget, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(taps [S, L, H], final [S, H]) of a grouped-query target in float64."""
    w = {name: tensor.double() for name, tensor in target.state_dict().items()}
    x = w["embed_tokens.weight"][ids]
    taps = []
    for i in range(4):
        at = f"layers.{i}."
        qkv = _norm(x, w[at + "input_layernorm.weight"]) @ w[at + "self_attn.qkv_proj.weight"].T
        heads = qkv.view(len(ids), 8, 8)  # 4 query, 2 key and 2 value heads of 8
        mixed = torch.zeros(len(ids), 4, 8, dtype=torch.float64)
        for head in range(4):
            own = 4 + head // 2
            keys = torch.stack([_turn(heads[s, own], s) for s in range(len(ids))])
            for t in range(len(ids)):
                q = _turn(heads[t, head], t)
                share = torch.softmax(keys[: t + 1] @ q / math.sqrt(8), 0)
                mixed[t, head] = share @ heads[: t + 1, own + 2]
        x = x + mixed.flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        y = _norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (y @ w[at + "mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
        if i in TAPS:
            taps.append(x)
    return torch.stack(taps, 1), _norm(x, w["final_norm.weight"])
