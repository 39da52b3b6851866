"""Experts: chosen as transformers chooses them in any precision, and alike in any batch."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import covered_model, decoder_of

from dspark.config.target import ExpertConfig, TargetConfig
from dspark.model.moe import ExpertsMLP

CONFIG = ExpertConfig(
    first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
    moe_intermediate_size=16, n_group=4, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=2.5,
)  # fmt: skip


@pytest.fixture
def experts() -> ExpertsMLP:
    torch.manual_seed(3)
    made = ExpertsMLP(32, CONFIG, 1e-5)
    with torch.no_grad():
        made.gate.weight.normal_(0, 0.2)
        made.gate.correction.normal_(0, 0.3)
    return made.requires_grad_(False)


def test_a_token_gets_the_same_sum_alone_and_in_a_batch(experts: ExpertsMLP) -> None:
    x = torch.randn(3, 5, 32)
    whole = experts(x)
    for b in range(3):
        for t in range(5):
            alone = experts(x[b : b + 1, t : t + 1])
            assert torch.allclose(alone[0, 0], whole[b, t], rtol=0, atol=1e-6)


def test_casting_to_bfloat16_leaves_the_choice_of_experts_exact(experts: ExpertsMLP) -> None:
    x = torch.randn(500, 32).bfloat16()
    before = experts.gate(x)
    experts = experts.to(torch.bfloat16)
    after = experts.gate(x)
    assert experts.shared_experts.down_proj.weight.dtype == torch.bfloat16
    assert experts(x).dtype == torch.bfloat16
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0], after[0])


def test_only_open_groups_are_used_and_the_correction_is_no_weight(experts: ExpertsMLP) -> None:
    x = torch.randn(200, 32)
    weights, chosen = experts.gate(x)
    assert all(len(set((row // 2).tolist())) <= CONFIG.topk_group for row in chosen)
    assert torch.allclose(weights.sum(-1), torch.full((200,), 2.5))
    scores = torch.sigmoid(x @ experts.gate.weight.T).gather(-1, chosen)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True) * 2.5)


def test_a_mixture_of_experts_target_is_ours_and_not_the_adapters() -> None:
    model = covered_model("mla-moe-groups")
    target = decoder_of(model)
    assert [isinstance(layer.mlp, ExpertsMLP) for layer in target.layers] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("scoring_func", "softmax", "scoring_func"), ("topk_method", "greedy", "topk_method"),
     ("moe_layer_freq", 2, "moe_layer_freq"), ("n_group", 5, "groups")],
)  # fmt: skip
def test_another_kind_of_router_is_refused_with_its_name(
    key: str, value: object, reason: str
) -> None:
    raw = {**covered_model("mla-moe").config.to_dict(), key: value}
    with pytest.raises(ValueError, match=reason):
        TargetConfig.from_hf(raw)
