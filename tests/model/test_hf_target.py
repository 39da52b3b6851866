"""The transformers adapter against our decoder, on families only it can run, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_targets import (
    LAYERS,
    TAPS,
    covered_model,
    decoder_of,
    gap,
    random_ids,
    transformers_model,
)
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from dspark.errors import DecodingError, TargetError
from dspark.model.hf_target import HFTarget
from dspark.model.spans import Span
from dspark.model.target import Target, TargetOutput

CPU = torch.device("cpu")
TOLERANCE = 1e-5

# Families without a decoder of our own, among them parallel residuals, scaled embeddings, learned
# positions, windows of 4 tokens (every layer, or two of three) and mixture-of-experts layers.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gemma": ("gemma", {"num_key_value_heads": 2, "head_dim": 8}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mistral-window": ("mistral", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
    "qwen2-window": (
        "qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4,
         "max_window_layers": 2},
    ),
    "deepseek-moe": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1,
         "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "mla-yarn-mscale", *OTHERS])
def pair(request: pytest.FixtureRequest) -> tuple[Any, HFTarget]:
    if request.param in OTHERS:
        kind, fields = OTHERS[request.param]
        model = transformers_model(kind, **fields)
    else:
        model = covered_model(request.param)
    return model, HFTarget(model, TAPS)


def at(target: Target, ids: Tensor, start: int, cache: Any) -> TargetOutput:
    return target.forward(ids, Span.at(start, ids.shape[1], ids.shape[0], CPU), cache)


def alone(target: Target, ids: Tensor) -> TargetOutput:
    return target.forward(ids, Span.alone(ids.shape[0], ids.shape[1], CPU), None)


def test_states_are_the_ones_transformers_reports(pair: tuple[Any, HFTarget]) -> None:
    model, target = pair
    ids = random_ids(2, 20)
    want = model(ids, output_hidden_states=True, use_cache=False)
    got = alone(target, ids)
    assert torch.equal(got.final, want.hidden_states[-1])
    assert torch.equal(target.logits(got.final), want.logits)
    for slot, layer in enumerate(TAPS):
        assert torch.equal(got.taps[..., slot, :], want.hidden_states[layer + 1])
        assert gap(got.taps[..., slot, :], want.hidden_states[layer]) > 0.01


def test_cached_steps_and_rollback_equal_one_forward(pair: tuple[Any, HFTarget]) -> None:
    _, target = pair
    ids, rejected = random_ids(1, 20), random_ids(1, 7, seed=1)
    whole = alone(target, ids)
    cache = target.new_cache(1, 24)
    parts = [at(target, ids[:, :8], 0, cache)]
    for start, stop in ((8, 9), (9, 13), (13, 20)):
        at(target, rejected, start, cache)  # a block that is then rejected
        parts.append(at(target, ids[:, start:stop], start, cache))
    assert gap(torch.cat([p.final for p in parts], 1), whole.final) <= TOLERANCE
    assert gap(torch.cat([p.taps for p in parts], 1), whole.taps) <= TOLERANCE
    again = at(target, ids, 0, cache)
    assert gap(again.final, whole.final) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "mla-half-split"])
def test_adapter_and_decoder_agree(name: str) -> None:
    model = covered_model(name)
    targets: list[Target] = [HFTarget(model, TAPS), decoder_of(model)]
    prompt, block, other = random_ids(2, 9), random_ids(2, 4, seed=1), random_ids(2, 6, seed=2)
    outputs = []
    for target in targets:
        cache = target.new_cache(2, 32)
        runs = [(prompt, 0), (block, 9), (other, 11), (block[:, :1], 17)]
        out = [at(target, ids, start, cache) for ids, start in runs]
        outputs.append(out)
        assert (target.hidden_size, target.num_layers, target.vocab_size) == (32, LAYERS, 97)
        assert (target.max_context, target.layer_ids) == (128, TAPS)
        assert (target.device, target.dtype) == (CPU, torch.float32)
    for mine, ours in zip(*outputs, strict=True):
        assert gap(mine.final, ours.final) <= TOLERANCE
        assert gap(mine.taps, ours.taps) <= TOLERANCE
        assert gap(targets[0].logits(mine.final), targets[1].logits(ours.final)) <= TOLERANCE
    assert torch.equal(targets[0].embedding_weight(), targets[1].embedding_weight())
    assert torch.equal(targets[0].head_weight(), targets[1].head_weight())
    raw = 5 * torch.randn(3, 32)
    assert gap(targets[0].norm(raw), targets[1].norm(raw)) <= TOLERANCE


def test_a_shared_prefix_is_continued_by_every_sequence() -> None:
    target = HFTarget(covered_model("llama"), TAPS)
    ids = random_ids(3, 12)
    ids[:, :5] = ids[0, :5]
    prefix = target.new_cache(1, 6)
    at(target, ids[:1, :6], 0, prefix)
    cache = target.new_cache(3, 12)
    cache.seed(prefix, 5)
    got = at(target, ids[:, 5:], 5, cache)
    assert gap(got.final, alone(target, ids).final[:, 5:]) <= TOLERANCE


def test_two_adapters_of_one_model_keep_their_own_taps() -> None:
    model = covered_model("llama")
    few, many = HFTarget(model, (1,)), HFTarget(model, TAPS)
    ids = random_ids(1, 6)
    assert torch.equal(alone(few, ids).taps[..., 0, :], alone(many, ids).taps[..., 1, :])
    assert alone(HFTarget(model), ids).taps.shape == (1, 6, 0, 32)


def test_only_batches_at_one_position_run() -> None:
    target = HFTarget(covered_model("llama"), TAPS)
    assert not target.supports_ragged
    ids = random_ids(2, 8)
    cache = target.new_cache(2, 8)
    at(target, ids[:, :5], 0, cache)
    same = target.forward(ids[:, 5:], Span.ragged(torch.tensor([5, 5]), 3), cache)
    assert gap(same.final, alone(target, ids).final[:, 5:]) <= TOLERANCE
    with pytest.raises(TargetError, match="one position"):
        target.forward(ids[:, 5:], Span.ragged(torch.tensor([5, 4]), 3), cache)


def test_positions_without_predecessors_or_room_are_refused() -> None:
    target = HFTarget(covered_model("llama"), TAPS)
    ids = random_ids(1, 4)
    cache = target.new_cache(1, 6)
    at(target, ids, 0, cache)
    with pytest.raises(DecodingError, match="starts at token 4"):
        at(target, ids[:, :1], 5, cache)
    with pytest.raises(DecodingError, match="most token 6"):
        at(target, ids, 3, cache)
    with pytest.raises(DecodingError, match="a cache"):
        target.forward(ids, Span.at(3, 4, 1, CPU), None)


KIMI_LINEAR: dict[str, Any] = {
    "pad_token_id": 0,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("mamba", {"intermediate_size": 64}, "recurrent state"),
        ("kimi_linear", KIMI_LINEAR, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("gemma2", {**_GROUPED, "final_logit_softcapping": 0.5}, "scaled or capped"),
        ("cohere", {"num_key_value_heads": 2, "logit_scale": 0.1}, "scaled or capped"),
        ("phi", {}, "bias"),
        ("llama", {**_GROUPED, "layer_types": ["full_attention", "conv"] * 2}, "type conv"),
        ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 2}, "conv"),
    ],
)
def test_models_whose_states_cannot_be_used_are_refused(
    kind: str, fields: dict[str, Any], reason: str
) -> None:
    model = transformers_model(kind, **fields)
    with pytest.raises(TargetError, match=reason):
        HFTarget(model, TAPS)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    with pytest.raises(TargetError, match="encoder-decoder"):
        HFTarget(T5ForConditionalGeneration(config))


def test_a_model_without_a_known_final_norm_is_refused() -> None:
    model = covered_model("llama")
    model.model.closing_scale = model.model.norm
    del model.model.norm
    with pytest.raises(TargetError, match="one final norm"):
        HFTarget(model, TAPS)


class Remembering(torch.nn.Module):
    """A recurrence outside the key-value cache: what it saw last changes what it says next."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.memory: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x + self.memory)
        self.memory = x.mean(1, keepdim=True)
        return out


def test_a_hidden_recurrent_state_is_measured_and_refused() -> None:
    model = covered_model("llama")
    model.model.layers[1].mlp = Remembering(model.model.layers[1].mlp)
    with pytest.raises(TargetError, match="rollback changes the states"):
        HFTarget(model, TAPS)


class Doubling(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out: Tensor = self.inner(*args, **options)
        return 2 * out


def test_a_tap_that_transformers_reports_differently_is_refused() -> None:
    model = covered_model("llama")
    model.model.layers[1] = Doubling(model.model.layers[1])
    with pytest.raises(TargetError, match=r"layer 1 that is not hidden_states\[2\]"):
        HFTarget(model, TAPS)


@pytest.mark.parametrize("taps", [(1, 0), (LAYERS - 1,), (LAYERS + 3,)])
def test_layers_that_cannot_be_tapped_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match="target_layer_ids"):
        HFTarget(covered_model("llama"), taps)
