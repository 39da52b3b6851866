"""The draft's published form (names, shapes, counts at Kimi-K3 size) and what its rows may see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from draft_forms import states_of
from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.model.draft import DSparkDraft
from dspark.model.init import FINAL_NORM_GAIN, initialise
from dspark.model.support import OUTSIDE_BIAS, clear_spare_rank, fold_support, read_support

SMALL = K3DraftConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=6,
    vocab_size=61,
    max_position_embeddings=256,
    target_layer_ids=(0, 2, 4),
    target_num_hidden_layers=6,
    target_hidden_size=32,
    mask_token_id=60,
    markov_rank=4,
    block_size=5,
)
KIMI_K3 = K3DraftConfig(
    hidden_size=7168,
    intermediate_size=14336,
    num_hidden_layers=5,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163_840,
    max_position_embeddings=262_144,
    rope_parameters=RopeParameters(
        rope_type="yarn",
        rope_theta=50_000.0,
        factor=64.0,
        original_max_position_embeddings=4096,
    ),
    target_layer_ids=(2, 23, 47, 71, 89),
    target_num_hidden_layers=93,
    target_hidden_size=7168,
    mask_token_id=163_838,
)


@pytest.fixture
def draft() -> DSparkDraft:
    torch.manual_seed(9)
    module = DSparkDraft(SMALL).eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.uniform_(0.5, 2)
    return module


def context_of(draft: DSparkDraft, length: int, shift: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, length, 3, SMALL.hidden_size, generator=generator)
    positions = torch.arange(shift, shift + length).unsqueeze(0)
    return draft.context_rows(draft.context(taps), positions)


def block_at(anchor_at: int, width: int = SMALL.block_size) -> Tensor:
    return torch.arange(anchor_at, anchor_at + width).unsqueeze(0)


def gap(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_kimi_k3_draft_has_the_published_tensors() -> None:
    with torch.device("meta"):
        state = DSparkDraft(KIMI_K3).state_dict()
    hidden, rank, vocab, mlp = 7168, 256, 163_840, 14336
    want: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (hidden, 5 * hidden),
        "context_norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(5):
        want |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_a_proj.weight": (1536, hidden),
            f"layers.{i}.self_attn.q_a_layernorm.weight": (1536,),
            f"layers.{i}.self_attn.q_b_proj.weight": (64 * (128 + 64), 1536),
            f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight": (512 + 64, hidden),
            f"layers.{i}.self_attn.kv_a_layernorm.weight": (512,),
            f"layers.{i}.self_attn.kv_b_proj.weight": (64 * (128 + 128), 512),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, 64 * 128),
            f"layers.{i}.mlp.gate_proj.weight": (mlp, hidden),
            f"layers.{i}.mlp.up_proj.weight": (mlp, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, mlp),
        }
    assert {name: tuple(t.shape) for name, t in state.items()} == want
    assert len(state) == 68
    assert sum(t.numel() for t in state.values()) == 3_562_312_961
    assert sum(t.numel() for n, t in state.items() if n != "embed_tokens.weight") == 2_387_907_841
    assert KIMI_K3.row_width == 576


def test_only_the_embedding_is_frozen() -> None:
    frozen = [name for name, p in DSparkDraft(SMALL).named_parameters() if not p.requires_grad]
    assert frozen == ["embed_tokens.weight"]


def test_block_inputs_are_the_anchor_and_masks(draft: DSparkDraft) -> None:
    ids = draft.block_ids(torch.tensor([7, 9]))
    assert ids.tolist() == [[7, 60, 60, 60, 60], [9, 60, 60, 60, 60]]


@pytest.mark.parametrize("serving", [False, True])
def test_block_rows_see_the_whole_block_in_both_directions(
    draft: DSparkDraft, serving: bool
) -> None:
    rows = context_of(draft, 8)
    ids = draft.block_ids(torch.tensor([7]))

    def run(ids: Tensor) -> Tensor:
        return states_of(draft, ids, block_at(8), rows, serving=serving)[0]

    base = run(ids)
    last, first = ids.clone(), ids.clone()
    last[0, -1], first[0, 0] = 3, 8
    assert gap(run(last)[0], base[0]) > 0.01  # slot 0 sees the last slot
    assert gap(run(first)[-1], base[-1]) > 0.01  # the last slot sees the anchor
    assert run(ids).shape == (SMALL.block_size, SMALL.hidden_size)


def test_context_rows_do_not_pass_the_input_norm(draft: DSparkDraft) -> None:
    ids = draft.block_ids(torch.tensor([7]))
    rows = context_of(draft, 8)
    states = draft.backbone(ids, block_at(8), rows, None)
    for layer in draft.draft_layers:
        layer.input_layernorm.weight.uniform_(0.1, 3)
    for before, after in zip(rows, context_of(draft, 8), strict=True):
        assert torch.equal(before, after)
    assert gap(draft.backbone(ids, block_at(8), rows, None), states) > 0.01


def test_a_context_row_is_the_projected_normed_and_rotated_tap(draft: DSparkDraft) -> None:
    taps = torch.randn(1, 1, 3, SMALL.hidden_size, generator=torch.Generator().manual_seed(1))
    position = 11
    rows = draft.context_rows(draft.context(taps), torch.tensor([[position]]))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + SMALL.rms_norm_eps).sqrt() * weight

    joined = torch.cat([taps[0, 0, i] for i in range(3)])
    c = normed(draft.state_dict()["context_proj.weight"] @ joined, draft.context_norm.weight)
    for layer, row in zip(draft.draft_layers, rows, strict=True):
        attention = layer.self_attn
        raw = attention.kv_a_proj_with_mqa.weight @ c
        latent = normed(raw[:16], attention.kv_a_layernorm.weight)
        turned = []
        for i in range(4):
            angle = position * 10_000 ** (-i / 4)
            a, b = float(raw[16 + 2 * i]), float(raw[17 + 2 * i])
            turned += [a * math.cos(angle) - b * math.sin(angle)]
            turned += [a * math.sin(angle) + b * math.cos(angle)]
        want = torch.cat([latent, torch.tensor(turned)])
        assert gap(row[0, 0], want) < 1e-5


def test_only_distances_between_positions_matter(draft: DSparkDraft) -> None:
    ids = draft.block_ids(torch.tensor([7]))
    base = draft.backbone(ids, block_at(8), context_of(draft, 8), None)
    moved = draft.backbone(ids, block_at(108), context_of(draft, 8, shift=100), None)
    assert gap(moved, base) < 1e-5
    apart = draft.backbone(ids, block_at(11), context_of(draft, 8), None)
    assert gap(apart, base) > 0.01


def test_blocks_under_a_dense_mask_equal_blocks_served_alone(draft: DSparkDraft) -> None:
    """The training layout: all blocks of a sequence in one pass, each with its own context."""
    width, length, anchors = SMALL.block_size, 10, [2, 6, 7]
    rows = context_of(draft, length)
    tokens = torch.tensor([7, 9, 11])
    ids = draft.block_ids(tokens).reshape(1, -1)
    positions = torch.cat([block_at(a) for a in anchors], 1)
    mask = torch.zeros(1, 1, 3 * width, length + 3 * width, dtype=torch.bool)
    for b, anchor in enumerate(anchors):
        block = slice(b * width, (b + 1) * width)
        mask[..., block, :anchor] = True
        mask[..., block, length + b * width : length + (b + 1) * width] = True
    together = draft.backbone(ids, positions, rows, mask).view(3, width, -1)
    for b, anchor in enumerate(anchors):
        own = [row[:, :anchor] for row in rows]
        block_ids = draft.block_ids(tokens[b : b + 1])
        for serving in (False, True):
            alone = states_of(draft, block_ids, block_at(anchor), own, serving=serving)
            assert gap(together[b], alone[0]) < 1e-5


def test_initial_weights_are_neutral_where_they_should_be() -> None:
    embedding = torch.randn(SMALL.vocab_size, SMALL.hidden_size)
    draft = initialise(DSparkDraft(SMALL), embedding, seed=4)
    assert torch.equal(draft.embed_tokens.weight, embedding)
    assert not draft.confidence_head.proj.weight.any()
    assert not draft.confidence_head.proj.bias.any()
    assert bool((draft.final_norm.weight == FINAL_NORM_GAIN).all())
    again = initialise(DSparkDraft(SMALL), embedding, seed=4).state_dict()
    other = initialise(DSparkDraft(SMALL), embedding, seed=5).state_dict()
    for name, weight in draft.state_dict().items():
        assert torch.equal(weight, again[name])
    assert not torch.equal(again["context_proj.weight"], other["context_proj.weight"])


def test_a_folded_vocabulary_lowers_every_other_token_and_reads_back(draft: DSparkDraft) -> None:
    assert read_support(draft) is None
    clear_spare_rank(draft)
    assert read_support(draft) is None
    support = torch.tensor([1, 5, 40])
    previous = torch.arange(SMALL.vocab_size)
    markov = draft.markov_head
    before = markov.markov_w2(markov.markov_w1(previous))
    fold_support(draft, support)
    after = markov.markov_w2(markov.markov_w1(previous))
    outside = torch.ones(SMALL.vocab_size, dtype=torch.bool)
    outside[support] = False
    assert torch.equal(after[:, support], before[:, support])
    assert bool((after[:, outside] < OUTSIDE_BIAS / 2).all())
    found = read_support(draft)
    assert found is not None
    assert found.tolist() == support.tolist()
