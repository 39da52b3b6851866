"""The qwen3 flavour: published names, a row computed by hand, and the numbers of the reference.

:data:`REFERENCE` was computed once by the code that publishes these drafts (deepseek-ai/DeepSpec at
commit afdfa7c, ``Qwen3DSparkModel`` with eager attention, transformers 5.24): block states after
the final norm, logits with the Markov bias, and confidence logits, of one block behind seven context
tokens. Weights and states come from :func:`spread`, which is integer arithmetic, so the comparison
stands on no random generator and lives on here without that code.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_forms import states_of
from dspark.config.architecture import MarkovHeadType, Qwen3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft
from dspark.model.gqa import GroupedBlockAttention
from dspark.model.layers import RMSNorm

CONTEXT = 7
YARN = RopeParameters(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=16,
    mscale_all_dim=0.0,
)
CASES: dict[MarkovHeadType, RopeParameters] = {
    "vanilla": RopeParameters(rope_theta=100.0),
    "gated": YARN,
}
# fmt: off
REFERENCE: dict[MarkovHeadType, dict[str, Any]] = {
    "vanilla": {
        "states": [
            [0.02477, -0.85073, 1.79727, 1.09915, -0.79854, -1.19622, 0.81071, -0.25302, -0.78725, 1.22243, -0.54423, 0.69479, -0.55044, 0.503, 0.92831, -1.07477],
            [-1.20006, -0.11587, 0.92844, 0.93117, 0.4266, -0.97882, 0.39175, 1.71154, -0.11757, 1.7758, -0.86027, -1.40556, -0.14451, -0.28889, 0.1683, 1.27067],
            [-1.10095, 0.47253, -0.16542, 0.46921, 0.84614, -0.41097, -0.43245, 2.24538, 0.65666, 0.8815, -1.47648, -1.39968, 0.13567, -1.02788, 0.14513, 2.37881],
        ],
        "logits": [
            [-0.59595, -1.85123, -0.89449, -0.2481, 0.23382, 2.55762, 0.7829, -0.34254, -0.29966, -0.59705, -1.85234, -0.92193, 1.22264],
            [0.90218, 1.07029, 0.84781, 1.15369, -0.1127, 0.41872, -0.29726, -1.20092, -0.13457, -0.41168, -0.24357, 1.1942, 1.31168],
            [-0.08594, 0.35101, 2.41561, 2.17544, 0.58813, -0.07921, -1.48708, -2.23399, -2.00521, 1.21869, 1.65564, 2.00732, 1.09857],
        ],
        "confidence": [0.74483, 1.64503, 1.21221],
    },
    "gated": {
        "states": [
            [0.47164, -0.62316, 1.43833, 0.70367, -0.79544, -0.65461, 0.39275, -0.58624, -0.38318, 0.98146, -1.35466, 1.38087, -0.46082, 0.26379, 1.50781, -1.21689],
            [-0.79742, -0.40359, 1.44812, 1.10456, 0.12666, -1.00997, 0.98108, 0.95123, -0.57143, 1.97991, -0.10488, -0.88453, -0.23529, 0.15139, 0.29114, 0.49797],
            [-0.9124, 0.34714, -0.05491, 0.87859, 0.83205, -0.3452, -0.34489, 1.65759, 0.61021, 1.21814, -1.24155, -1.12147, 0.09572, -1.16728, 0.3634, 2.60307],
        ],
        "logits": [
            [-1.11204, -2.20627, -1.39123, -0.33184, 0.8155, 2.25363, 1.14222, 0.5594, -0.43024, -0.94772, -2.04195, -1.23412, 0.69169],
            [0.63688, 0.31777, 0.54784, 1.0594, 0.08078, 0.63813, 0.02279, -1.06247, 0.27578, -0.36853, -0.68764, 0.76852, 1.12533],
            [-0.21397, 0.06217, 2.1658, 1.96413, 0.49841, 0.2369, -1.31652, -2.12242, -1.52427, 0.9529, 1.22903, 1.75198, 1.05447],
        ],
        "confidence": [0.31529, 1.52662, 1.05381],
    },
}
# fmt: on


def spread(shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    """Numbers in [-0.5, 0.5) from a multiplicative hash of the element's index."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    hashed = ((index + 1) * 2654435761 + seed * 40503) % 4294967296
    return (hashed.double() / 4294967296 - 0.5).float().view(shape)


def reference_config(kind: MarkovHeadType) -> Qwen3DraftConfig:
    return Qwen3DraftConfig(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        vocab_size=13,
        max_position_embeddings=64,
        rope_parameters=CASES[kind],
        target_layer_ids=(0, 2),
        target_num_hidden_layers=4,
        target_hidden_size=16,
        mask_token_id=12,
        markov_rank=3,
        markov_head_type=kind,
        block_size=3,
    )


def reference_draft(kind: MarkovHeadType = "vanilla") -> DSparkDraft:
    draft = DSparkDraft(reference_config(kind)).eval().requires_grad_(False)
    for seed, (_, weight) in enumerate(sorted(draft.named_parameters())):
        numbers = spread(weight.shape, seed)
        if weight.dim() > 1:
            weight.copy_(numbers * 3.4 * weight.shape[-1] ** -0.5)
        else:
            weight.copy_(numbers + 1)
    return draft


def context_taps() -> Tensor:
    return spread((1, CONTEXT, 2, 16), 100) * 4


def gap(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_states_logits_and_confidence_are_those_of_the_reference(
    kind: MarkovHeadType, serving: bool
) -> None:
    draft, want = reference_draft(kind), REFERENCE[kind]
    rows = draft.context_rows(draft.context(context_taps()), torch.arange(CONTEXT).unsqueeze(0))
    positions = torch.arange(CONTEXT, CONTEXT + 3).unsqueeze(0)
    ids = draft.block_ids(torch.tensor([5]))
    states = states_of(draft, ids, positions, rows, serving=serving)[0]
    m, e = draft.markov_head.block(torch.tensor([5, 8, 2]), states)
    head = spread((13, 16), 99) * 3.4 / 4
    logits = states @ head.T + draft.markov_head.markov_w2(m)
    assert gap(states, torch.tensor(want["states"])) < 2e-5
    assert gap(logits, torch.tensor(want["logits"])) < 2e-5
    assert gap(draft.confidence_head(states, e), torch.tensor(want["confidence"])) < 2e-5


def test_the_published_draft_for_qwen3_4b_has_these_tensors() -> None:
    config = Qwen3DraftConfig(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_parameters=RopeParameters(rope_theta=1e6),
        target_layer_ids=(1, 9, 17, 25, 33),
        target_num_hidden_layers=36,
        target_hidden_size=2560,
        mask_token_id=151_669,
    )
    with torch.device("meta"):
        state = DSparkDraft(config).state_dict()
    hidden, rank, vocab, inner = 2560, 256, 151_936, 9728
    want: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 5 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(5):
        want |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (32 * 128, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (8 * 128, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (8 * 128, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, 32 * 128),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    assert {name: tuple(t.shape) for name, t in state.items()} == want


def test_a_context_row_is_the_normed_and_rotated_key_and_the_plain_value() -> None:
    draft = reference_draft()
    taps, position = context_taps()[:, :1], 11
    rows = draft.context_rows(draft.context(taps), torch.tensor([[position]]))
    state = draft.state_dict()

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weight

    c = normed(state["fc.weight"] @ taps[0, 0].flatten(), state["hidden_norm.weight"])
    for i, row in enumerate(rows):
        at = f"layers.{i}.self_attn."
        want = []
        for head in (state[at + "k_proj.weight"] @ c).split(6):
            key = normed(head, state[at + "k_norm.weight"]).tolist()
            turned = [0.0] * 6
            for j in range(3):
                angle = position * 100 ** (-j / 3)
                turned[j] = key[j] * math.cos(angle) - key[j + 3] * math.sin(angle)
                turned[j + 3] = key[j] * math.sin(angle) + key[j + 3] * math.cos(angle)
            want += turned
        want += (state[at + "v_proj.weight"] @ c).tolist()
        assert row.shape == (1, 1, draft.config.row_width)
        assert gap(row[0, 0], torch.tensor(want)) < 1e-5


def test_only_distances_between_positions_matter() -> None:
    draft, taps = reference_draft(), context_taps()
    ids = draft.block_ids(torch.tensor([5]))
    states = []
    for shift in (0, 40):
        where = torch.arange(shift, shift + CONTEXT).unsqueeze(0)
        rows = draft.context_rows(draft.context(taps), where)
        block = torch.arange(shift + CONTEXT, shift + CONTEXT + 3).unsqueeze(0)
        states.append(draft.backbone(ids, block, rows, None))
    assert gap(states[1], states[0]) < 1e-5


def test_block_rows_see_the_whole_block_in_both_directions() -> None:
    draft = reference_draft()
    rows = draft.context_rows(draft.context(context_taps()), torch.arange(CONTEXT).unsqueeze(0))
    positions = torch.arange(CONTEXT, CONTEXT + 3).unsqueeze(0)
    base = draft.backbone(torch.tensor([[5, 12, 12]]), positions, rows, None)[0]
    last = draft.backbone(torch.tensor([[5, 12, 3]]), positions, rows, None)[0]
    first = draft.backbone(torch.tensor([[6, 12, 12]]), positions, rows, None)[0]
    assert gap(last[0], base[0]) > 1e-4
    assert gap(first[-1], base[-1]) > 1e-4


def test_context_keys_pass_k_norm_and_not_the_input_norm() -> None:
    draft = reference_draft()
    where = torch.arange(CONTEXT).unsqueeze(0)
    before = draft.context_rows(draft.context(context_taps()), where)
    for layer in draft.draft_layers:
        layer.input_layernorm.weight.uniform_(0.1, 3)
    for a, b in zip(before, draft.context_rows(draft.context(context_taps()), where), strict=True):
        assert torch.equal(a, b)
    attention = draft.draft_layers[0].self_attn
    assert isinstance(attention, GroupedBlockAttention)
    attention.k_norm.weight.mul_(2)
    doubled = draft.context_rows(draft.context(context_taps()), where)[0]
    assert gap(doubled[..., :12], 2 * before[0][..., :12]) < 1e-6
    assert torch.equal(doubled[..., 12:], before[0][..., 12:])


def test_parts_with_two_names_are_reached_by_one() -> None:
    draft = reference_draft()
    assert draft.context_proj is draft.get_submodule("fc")
    assert draft.context_norm is draft.get_submodule("hidden_norm")
    assert draft.final_norm is draft.get_submodule("norm")
    assert isinstance(draft.final_norm, RMSNorm)
