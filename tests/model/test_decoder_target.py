"""Our decoder against transformers: every covered family, every way of cutting up a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_targets import COVERED, LAYERS, TAPS, covered_model, decoder_of, gap, random_ids
from torch import Tensor

from dspark.config.layers import to_convention
from dspark.config.target import TargetConfig
from dspark.errors import TargetError
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget, TargetOutput
from dspark.model.weights import target_state

CPU = torch.device("cpu")
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=sorted(COVERED))
def pair(request: pytest.FixtureRequest) -> tuple[Any, DecoderTarget]:
    model = covered_model(request.param)
    return model, decoder_of(model)


def alone(target: DecoderTarget, ids: Tensor) -> TargetOutput:
    return target.forward(ids, Span.alone(ids.shape[0], ids.shape[1], CPU))


def at(target: DecoderTarget, ids: Tensor, start: int, cache: Any) -> TargetOutput:
    return target.forward(ids, Span.at(start, ids.shape[1], ids.shape[0], CPU), cache)


def test_logits_and_states_equal_transformers(pair: tuple[Any, DecoderTarget]) -> None:
    model, target = pair
    ids = random_ids(2, 40)
    want = model(ids, output_hidden_states=True, use_cache=False)
    got = alone(target, ids)
    assert gap(got.final, want.hidden_states[-1]) <= TOLERANCE
    assert gap(target.logits(got.final), want.logits) <= TOLERANCE
    for slot, golden in enumerate(to_convention(TAPS, "hf_hidden_states")):
        assert golden == TAPS[slot] + 1
        assert gap(got.taps[..., slot, :], want.hidden_states[golden]) <= TOLERANCE
        for neighbour in (golden - 1, golden + 1):
            assert gap(got.taps[..., slot, :], want.hidden_states[neighbour]) > 0.05


def test_prefill_and_cached_steps_equal_one_forward(pair: tuple[Any, DecoderTarget]) -> None:
    _, target = pair
    ids = random_ids(2, 34)
    whole = alone(target, ids)
    cache = target.new_cache(2, 34)
    cuts = [0, 6, 7, 8, 12, 33, 34]  # one token, several tokens, more than the short-query path
    parts = [at(target, ids[:, a:b], a, cache) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert gap(torch.cat([p.final for p in parts], 1), whole.final) <= TOLERANCE
    assert gap(torch.cat([p.taps for p in parts], 1), whole.taps) <= TOLERANCE


def test_rejected_tokens_leave_no_trace(pair: tuple[Any, DecoderTarget]) -> None:
    _, target = pair
    ids, rejected = random_ids(1, 20), random_ids(1, 8, seed=1)
    cache = target.new_cache(1, 24)
    at(target, ids[:, :10], 0, cache)
    before = at(target, rejected, 10, cache)
    after = at(target, ids[:, 10:15], 10, cache)
    fresh = alone(target, ids[:, :15])
    assert gap(after.final, fresh.final[:, 10:]) <= TOLERANCE
    assert gap(after.taps, fresh.taps[:, 10:]) <= TOLERANCE
    assert gap(before.final[:, :5], after.final) > 0.05
    rest = at(target, ids[:, 15:], 15, cache)
    assert gap(rest.final, alone(target, ids).final[:, 15:]) <= TOLERANCE


@pytest.mark.parametrize("width", [1, 3])
def test_ragged_batch_equals_each_sequence_alone(
    pair: tuple[Any, DecoderTarget], width: int
) -> None:
    _, target = pair
    lengths = [5, 11, 8]
    ids = random_ids(3, 14)
    cache = target.new_cache(3, 16)
    at(target, ids[:, :11], 0, cache)  # right-padded: rows behind a sequence's length are stale
    step = torch.stack([ids[row, n : n + width] for row, n in enumerate(lengths)])
    got = target(step, Span.ragged(torch.tensor(lengths), width), cache)
    for row, n in enumerate(lengths):
        want = alone(target, ids[row : row + 1, : n + width])
        assert gap(got.final[row], want.final[0, n:]) <= TOLERANCE
        assert gap(got.taps[row], want.taps[0, n:]) <= TOLERANCE


def test_batch_rows_move_between_caches_and_still_continue_the_same_way() -> None:
    target = decoder_of(covered_model("llama"))
    prefix = target.new_cache(1, 4)
    ids = random_ids(3, 12)
    ids[:, :4] = ids[0, :4]
    want = alone(target, ids).final[:, 11]
    at(target, ids[:1, :4], 0, prefix)
    fresh = target.new_cache(3, 11)
    fresh.seed(prefix, 4)
    at(target, ids[:, 4:11], 4, fresh)
    pool = target.new_cache(5, 16)
    pool.adopt(torch.tensor([4, 0, 2]), fresh, 11)
    pool.keep(torch.tensor([0, 2, 4]))
    got = at(target, ids[[1, 2, 0], 11:], 11, pool).final[:, 0]
    assert gap(got, want[[1, 2, 0]]) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "mla-bias"])
def test_packed_products_equal_plain_ones(name: str) -> None:
    model = covered_model(name)
    ids = random_ids(2, 20)
    plain = decoder_of(model)
    want = alone(plain, ids)
    packed = decoder_of(model)
    assert packed.pack() == sum(isinstance(m, torch.nn.Linear) for m in plain.modules())
    got = alone(packed, ids)
    assert gap(packed.logits(got.final), plain.logits(want.final)) <= TOLERANCE
    assert torch.equal(packed.head_weight(), plain.head_weight())
    rounded = decoder_of(model)
    assert rounded.pack(torch.bfloat16) > 0
    states = alone(rounded, ids).final
    assert states.dtype == torch.float32
    assert 1e-4 < gap(states, want.final) < 0.1


def test_bfloat16_target_stays_close_to_float32() -> None:
    model = covered_model("qwen3")
    ids = random_ids(1, 30)
    want = alone(decoder_of(model), ids)
    got = alone(decoder_of(model).to(torch.bfloat16), ids)
    assert got.final.dtype == torch.bfloat16
    assert gap(got.final.float(), want.final) < 0.1


def test_a_weight_our_decoder_would_ignore_is_refused() -> None:
    model = covered_model("llama")
    config = TargetConfig.from_hf(model.config.to_dict())
    state = dict(model.state_dict())
    state["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    with pytest.raises(TargetError, match=r"layers\.0\.self_attn\.o_proj\.bias"):
        target_state(config, state)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_missing_weight_is_refused(name: str) -> None:
    model = covered_model("llama")
    state = {k: v for k, v in model.state_dict().items() if k != name}
    with pytest.raises(TargetError, match=name):
        target_state(TargetConfig.from_hf(model.config.to_dict()), state)


@pytest.mark.parametrize("taps", [(1, 0), (0, 0), (-1,), (LAYERS - 1,), (LAYERS,)])
def test_layers_that_cannot_be_tapped_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match="target_layer_ids"):
        decoder_of(covered_model("llama"), taps)


def test_without_taps_the_stack_of_states_is_empty() -> None:
    target = decoder_of(covered_model("llama"), ())
    assert alone(target, random_ids(2, 3)).taps.shape == (2, 3, 0, 32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", {"model_type": "gpt_neox"}, "gpt_neox"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"use_sliding_window": True}, "sliding"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.2}}, "attention_factor"),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ("mla", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "mscale"),
    ],
)
def test_a_feature_we_would_get_wrong_is_refused(
    name: str, change: dict[str, Any], reason: str
) -> None:
    raw = covered_model(name).config.to_dict()
    TargetConfig.from_hf(raw)
    with pytest.raises(ValueError, match=reason):
        TargetConfig.from_hf({**raw, **change})
