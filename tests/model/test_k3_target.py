"""What Kimi-K3 adds to Kimi Linear, in our decoder, against a plain writing-out of it."""

from __future__ import annotations

import copy

import pytest
import torch

from dspark.config.target import TargetConfig
from dspark.errors import TargetError
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from dspark.model.weights import target_state
from model.hybrid_models import Slots
from model.kimi_k3 import CONFIG, PlainK3, made
from model.tiny_targets import gap, random_ids

CPU = torch.device("cpu")
TAPS = (0, 2, 3, 5)
TOLERANCE = 1e-4


def decoder(tapped="prefix_sum", weights=None) -> DecoderTarget:
    config = TargetConfig.from_hf(copy.deepcopy(CONFIG))
    target = DecoderTarget(config, TAPS, tapped)
    target.load_state_dict(target_state(config, weights or made()), assign=True)
    return target.eval().requires_grad_(False)


def alone(target: DecoderTarget, ids: torch.Tensor):
    return target.forward(ids, Span.alone(len(ids), ids.shape[1], CPU))


@pytest.fixture(scope="module")
def plain():
    ids = random_ids(1, 40)
    with torch.no_grad():
        return ids, *PlainK3(made()).run(ids[0].tolist())


def test_logits_equal_the_plain_writing_out(plain) -> None:
    ids, logits, _, _ = plain
    target = decoder()
    assert gap(target.logits(alone(target, ids).final)[0], logits) <= TOLERANCE


@pytest.mark.parametrize("tapped", ["prefix_sum", "mixed"])
def test_both_tapped_streams_are_what_they_are_called(plain, tapped: str) -> None:
    ids, _, sums, mixtures = plain
    wanted, other = (sums, mixtures) if tapped == "prefix_sum" else (mixtures, sums)
    taps = alone(decoder(tapped), ids).taps[0]
    for slot, layer in enumerate(TAPS):
        assert gap(taps[:, slot], wanted[layer]) <= TOLERANCE
        assert gap(taps[:, slot], other[layer]) > 0.05


@pytest.mark.parametrize(
    "name",
    ["layers.3.self_attn.g_proj", "layers.4.self_attn.g_proj", "layers.5.mlp_res_proj",
     "layers.3.self_attention_res_norm", "output_attn_res_proj", "layers.2.self_attn.A_log",
     "layers.6.block_sparse_moe.routed_expert_norm"],
)  # fmt: skip
def test_every_addition_matters(plain, name: str) -> None:
    """None of them could be left out without a difference far above the tolerance."""
    ids, logits, _, _ = plain
    key = f"model.{name}" + ("" if name.endswith("A_log") else ".weight")
    weights = {k: torch.zeros_like(v) if k == key else v for k, v in made().items()}
    target = decoder(weights=weights)
    assert gap(target.logits(alone(target, ids).final)[0], logits) > 100 * TOLERANCE


def test_cached_chunks_and_rollback_equal_one_forward() -> None:
    target = decoder("mixed")
    ids = random_ids(2, 60, seed=3)
    slots = Slots(target, 2)
    slots.run([0, 1], [ids[0, :37].tolist(), ids[1, :5].tolist()])
    slots.commit([37, 5])
    slots.run([0, 1], [ids[0, 37:45].tolist(), ids[1, 5:9].tolist()])
    slots.commit([3, 0])
    out = slots.run([0, 1], [ids[0, 40:60].tolist(), ids[1, 5:12].tolist()])
    for row, (start, end, at) in enumerate(((40, 60, 0), (5, 12, 20))):
        want = alone(target, ids[row : row + 1, :end])
        part = slice(at, at + end - start)
        assert gap(out.final[0, part], want.final[0, start:]) <= TOLERANCE
        assert gap(out.taps[0, part], want.taps[0, start:]) <= TOLERANCE


def test_packed_products_equal_plain_ones() -> None:
    plain, packed = decoder(), decoder()
    assert packed.pack() == sum(isinstance(m, torch.nn.Linear) for m in plain.modules())
    ids = random_ids(2, 20)
    # Packed norms and products round otherwise, and seven random layers magnify that (3e-4).
    assert gap(alone(packed, ids).final, alone(plain, ids).final) <= 10 * TOLERANCE


def test_the_mixed_stream_needs_attention_residuals() -> None:
    raw = copy.deepcopy(CONFIG)
    del raw["text_config"]["attn_res_block_size"]
    with pytest.raises(TargetError, match="mixed stream"):
        DecoderTarget(TargetConfig.from_hf(raw), TAPS, "mixed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"mla_use_rope": True}, "rotary"), ({"moe_router_activation_func": "softmax"}, "router"),
     ({"hidden_act": "gelu"}, "hidden_act")],
)  # fmt: skip
def test_other_variants_are_refused(change, reason: str) -> None:
    raw = copy.deepcopy(CONFIG)
    raw["text_config"] |= change
    with pytest.raises(ValueError, match=reason):
        TargetConfig.from_hf(raw)


def test_the_published_sizes_are_read() -> None:
    """93 layers, 69 of them recurrent, 96 heads (moonshotai/Kimi-K3, config.json)."""
    full = [*range(4, 93, 4), 93]
    text = {
        **CONFIG["text_config"], "num_hidden_layers": 93, "hidden_size": 7168,
        "num_attention_heads": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "linear_attn_config": {
            **CONFIG["text_config"]["linear_attn_config"], "num_heads": 96, "head_dim": 128,
            "full_attn_layers": full, "kda_layers": [i for i in range(1, 94) if i not in full],
        },
    }  # fmt: skip
    config = TargetConfig.from_hf({"model_type": "kimi_k3", "text_config": text})
    assert len(config.recurrent_layers) == 69
    assert config.linear is not None
    assert config.linear.width == 12288
    with torch.device("meta"):
        layer = DecoderTarget(config.model_copy(update={"num_hidden_layers": 93}), ()).row_parts
    assert layer == ((1, 576),)
