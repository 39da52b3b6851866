"""Attention in windows is attention under the dense mask: the same states, the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    BLOCK,
    DRAFTS,
    gradients,
    made_record,
    one_thread,  # noqa: F401 (autouse)
    tiny_draft,
)
from torch import Tensor

from dspark.config.architecture import Flavour, MarkovHeadType
from dspark.model.windows import Windows
from dspark.training.anchors import (
    NEIGHBOURS,
    WINDOWS,
    Blocks,
    attention_mask,
    bounds_of,
    build_blocks,
    eligible,
    pack_blocks,
    sample_anchors,
)
from dspark.training.step import block_states

LENGTHS = (90, 140, 61)


RECORDS = [made_record(str(i), n, i, 5 + 3 * i) for i, n in enumerate(LENGTHS)]


def many_blocks(packed: bool) -> Blocks:
    """Forty anchors in one record, fewer in the others: several windows, some of it padding."""
    g = torch.Generator().manual_seed(3)
    anchors = [sample_anchors(r.loss_mask, n, g) for r, n in zip(RECORDS, (20, 40, 7), strict=True)]
    build = pack_blocks if packed else build_blocks
    return build(RECORDS, anchors, BLOCK)


def dense(blocks: Blocks, packed: bool) -> Tensor:
    size = blocks.ids.shape[1]
    lengths = torch.tensor([size] if packed else LENGTHS)
    return attention_mask(blocks.anchors, lengths, size, BLOCK, blocks.first if packed else None)


def states_and_gradients(
    kind: MarkovHeadType, flavour: Flavour, blocks: Blocks
) -> tuple[Tensor, dict[str, Tensor]]:
    draft = tiny_draft(kind, flavour).double()
    states = block_states(draft, blocks)
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(states.shape, generator=g, dtype=torch.float64)
    (states * weight * blocks.slot_mask.unsqueeze(-1)).sum().backward()
    for parameter in (*draft.markov_head.parameters(), *draft.confidence_head.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # not in the backbone
    return states.detach(), gradients(draft)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "flavour"), DRAFTS[::3])
def test_windows_equal_the_dense_mask(kind: MarkovHeadType, flavour: Flavour, packed: bool) -> None:
    blocks = many_blocks(packed)
    assert isinstance(blocks.attention, Windows)
    assert len(blocks.attention.parts) >= 3
    states, grads = states_and_gradients(kind, flavour, blocks)
    whole = replace(blocks, attention=dense(blocks, packed))
    wanted, want = states_and_gradients(kind, flavour, whole)
    # Rotations are fp32, whatever the weights are.
    torch.testing.assert_close(states, wanted, rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-6, atol=1e-6, msg=name)
    # A window too narrow by one row would be seen.
    first, *rest = blocks.attention.parts
    low, high = first.context
    short = replace(first, context=(low, high - 1), mask=first.mask[..., 1:])
    broken = replace(blocks, attention=replace(blocks.attention, parts=(short, *rest)))
    assert float((states_and_gradients(kind, flavour, broken)[0] - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize("packed", [False, True])
def test_windows_together_are_the_dense_mask(packed: bool) -> None:
    blocks = many_blocks(packed)
    assert isinstance(blocks.attention, Windows)
    wanted = dense(blocks, packed)
    assert torch.equal(blocks.attention.whole(), wanted)
    edges = [part.rows for part in blocks.attention.parts]
    assert [e[0] for e in edges] == [0, *(e[1] for e in edges[:-1])]
    pairs = sum(part.mask.numel() for part in blocks.attention.parts)
    assert pairs < 0.5 * wanted.numel()


@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_sees_what_the_dense_mask_shows(packed: bool) -> None:
    """One predicate: as a table, and inside the kernel of a GPU (which a CPU runs uncompiled)."""
    blocks = many_blocks(packed)
    wanted = dense(blocks, packed)
    batch, (rows, keys) = len(blocks.ids), wanted.shape[-2:]
    mask = blocks.flexible()
    at = [torch.arange(n) for n in (batch, 1, rows, keys)]
    b, h, q, k = (x.view(*(-1 if i == j else 1 for j in range(4))) for i, x in enumerate(at))
    assert torch.equal(mask.mask_mod(b, h, q, k), wanted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "flavour"), DRAFTS[::3])
def test_flex_attention_equals_the_dense_mask(
    kind: MarkovHeadType, flavour: Flavour, packed: bool
) -> None:
    blocks, draft = many_blocks(packed), tiny_draft(kind, flavour)
    with torch.no_grad():  # its backward pass is for GPUs only
        wanted = block_states(draft, replace(blocks, attention=dense(blocks, packed)))
        got = block_states(draft, replace(blocks, attention=blocks.flexible()))
        shifted = replace(blocks, anchors=blocks.anchors + 1).flexible()
        broken = block_states(draft, replace(blocks, attention=shifted))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert float((broken - wanted).abs().max()) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "flavour"), DRAFTS[::3])
def test_a_gpu_trains_as_a_cpu_does(kind: MarkovHeadType, flavour: Flavour) -> None:
    """flex_attention compiled, forward and backward, against windows on the CPU."""
    blocks, draft = many_blocks(packed=True), tiny_draft(kind, flavour)
    found = {}
    for device in ("cpu", "cuda"):
        states = block_states(draft.to(device), blocks.to(torch.device(device)))
        states.square().sum().backward()
        found[device] = [states, *(p.grad for p in draft.draft_layers.parameters())]
        found[device] = [t.detach().cpu() for t in found[device]]
        draft.zero_grad(set_to_none=True)
    for got, want in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_windows_are_few_and_cover_every_block() -> None:
    for count in (1, NEIGHBOURS, NEIGHBOURS + 1, 40, 512, 1000):
        bounds = bounds_of(list(range(count)), BLOCK)
        edges = [rows for rows, _ in bounds]
        assert [e[0] for e in edges] == [0, *(e[1] for e in edges[:-1])]
        assert edges[-1][1] == count * BLOCK
        assert len(edges) <= WINDOWS
    assert len(eligible(RECORDS[0].loss_mask)) > 20
