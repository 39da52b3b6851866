"""Packed twins of norms and linears are the same functions, at every row count and magnitude."""

from __future__ import annotations

import pytest
import torch

from dspark.model.layers import (
    PackedLinear,
    PackedNorm,
    RMSNorm,
    SwiGLU,
    pack_linears,
)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 576), (2, 5, 9, 64)])
def test_a_packed_norm_equals_the_fp64_formula_at_every_magnitude(
    scale: float, shape: tuple[int, ...]
) -> None:
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape) * scale
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    with torch.inference_mode():
        got = PackedNorm(norm)(x)
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()


def test_a_packed_norm_gives_zeros_for_zeros_and_keeps_other_dtypes() -> None:
    norm = RMSNorm(64, 1e-5)
    packed = PackedNorm(norm)
    assert torch.equal(packed(torch.zeros(2, 64)), torch.zeros(2, 64))
    x = torch.randn(2, 64).to(torch.bfloat16)
    assert torch.equal(packed(x), norm(x))


@pytest.mark.parametrize("shape", [(1, 1), (1,), (4,), (2, 3)])
def test_a_lone_row_through_a_large_packed_weight_equals_plain_and_keeps_its_shape(
    shape: tuple[int, ...],
) -> None:
    weight, bias = torch.randn(2048, 512) / 20, torch.randn(2048)
    x = torch.randn(*shape, 512)
    with torch.inference_mode():
        got = PackedLinear(weight, bias, torch.float32)(x)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert got.shape == want.shape
    assert (got.double() - want).abs().max() <= 1e-5


def test_packing_replaces_norms_too_and_counts_only_linears() -> None:
    module = torch.nn.Sequential(RMSNorm(16, 1e-5), SwiGLU(16, 32))
    assert pack_linears(module, torch.float32) == 3
    assert isinstance(module[0], PackedNorm)
