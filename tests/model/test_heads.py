"""Markov and confidence heads against formulas written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.config.architecture import MarkovHeadType
from dspark.model.heads import ConfidenceHead, MarkovHead

VOCAB, RANK, HIDDEN, WIDTH = 19, 4, 6, 5
KINDS: tuple[MarkovHeadType, ...] = ("vanilla", "gated", "rnn")


def head(kind: MarkovHeadType) -> MarkovHead:
    torch.manual_seed(11)
    return MarkovHead(kind, VOCAB, RANK, HIDDEN).double().requires_grad_(False)


def block_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    previous = torch.randint(0, VOCAB, (3, WIDTH), generator=generator)
    return previous, torch.randn(3, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)


def written_out(module: MarkovHead, previous: list[int], h: Tensor) -> Tensor:
    """m_k of one block [K, r], number by number."""

    def sigmoid(x: Tensor) -> Tensor:
        return 1 / (1 + (-x).exp())

    w1 = module.markov_w1.weight
    state = torch.zeros(RANK, dtype=torch.float64)
    out = []
    for k, token in enumerate(previous):
        e = w1[token]
        if module.kind == "vanilla":
            out.append(e)
        elif module.kind == "gated":
            weight, bias = module.gate_proj.weight, module.gate_proj.bias
            g = weight[:, :HIDDEN] @ h[k] + weight[:, HIDDEN:] @ e + bias
            out.append(sigmoid(g) * e)
        else:
            weight, bias = module.joint_proj.weight, module.joint_proj.bias
            joint = (
                weight[:, :RANK] @ state
                + weight[:, RANK : 2 * RANK] @ e
                + weight[:, 2 * RANK :] @ h[k]
                + bias
            )
            g, c, o = sigmoid(joint[:RANK]), joint[RANK : 2 * RANK], joint[2 * RANK :]
            state = g * state + (1 - g) * c.tanh()
            out.append(o.tanh())
    return torch.stack(out)


@pytest.mark.parametrize("kind", KINDS)
def test_block_equals_the_written_out_formula(kind: MarkovHeadType) -> None:
    module = head(kind)
    previous, h = block_inputs()
    m, e = module.block(previous, h)
    assert torch.equal(e, module.markov_w1.weight[previous])
    for row in range(3):
        want = written_out(module, previous[row].tolist(), h[row])
        assert torch.allclose(m[row], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_block(kind: MarkovHeadType) -> None:
    module = head(kind)
    previous, h = block_inputs()
    m, e = module.block(previous, h)
    state = module.start(h[:, 0])
    assert torch.equal(state, torch.zeros(3, RANK, dtype=torch.float64))
    for k in range(WIDTH):
        step_m, step_e, state = module.step(previous[:, k], h[:, k], state)
        assert torch.allclose(step_m, m[:, k], rtol=1e-12, atol=1e-14)
        assert torch.equal(step_e, e[:, k])


def test_only_the_rnn_head_looks_further_back_than_one_token() -> None:
    for kind in KINDS:
        module = head(kind)
        previous, h = block_inputs()
        m, _ = module.block(previous, h)
        changed = previous.clone()
        changed[:, 0] = (changed[:, 0] + 1) % VOCAB
        other, _ = module.block(changed, h)
        assert not torch.equal(other[:, 0], m[:, 0])
        assert torch.equal(other[:, 1:], m[:, 1:]) == (kind != "rnn")


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("vanilla", {}),
        ("gated", {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)}),
        (
            "rnn",
            {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)},
        ),
    ],
)
def test_parameters_have_published_names_and_shapes(
    kind: MarkovHeadType, extra: dict[str, tuple[int, ...]]
) -> None:
    shapes = {name: tuple(t.shape) for name, t in head(kind).state_dict().items()}
    both = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (VOCAB, RANK)}
    assert shapes == both | extra


def test_confidence_is_one_product_of_state_and_previous_embedding() -> None:
    torch.manual_seed(4)
    confidence = ConfidenceHead(HIDDEN, RANK).double().requires_grad_(False)
    shapes = {name: tuple(t.shape) for name, t in confidence.state_dict().items()}
    assert shapes == {"proj.weight": (1, HIDDEN + RANK), "proj.bias": (1,)}
    h = torch.randn(3, WIDTH, HIDDEN, dtype=torch.float64)
    e = torch.randn(3, WIDTH, RANK, dtype=torch.float64)
    weight = confidence.proj.weight[0]
    want = h @ weight[:HIDDEN] + e @ weight[HIDDEN:] + confidence.proj.bias
    got = confidence(h, e)
    assert got.shape == (3, WIDTH)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)
