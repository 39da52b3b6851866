"""FP8 rows: codes against an oracle of plain numbers, bounds for any finite row, and the linear."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from dspark.errors import CheckpointError
from dspark.model.fp8 import (
    CODES,
    FP8Linear,
    dequantize_rows,
    encode,
    install_fp8,
    plain_weight,
    quantize_rows,
    serving_form,
)
from dspark.quantize.rows import Measured, quantize_block, values, within_bounds

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
# Rows of any magnitudes, of subnormals only, and of one number.
ROWS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9),
    elements=st.one_of(
        FINITE,
        st.floats(-(2.0**-126), 2.0**-126, width=32),
        st.sampled_from([0.0, -0.0, 448.0, 1e-45, 3.4e38, 2.0**-10, 1.0]),
    ),
)
NUMBERS = [(code, float(v)) for code, v in enumerate(
    torch.arange(256, dtype=torch.uint8).view(CODES).double()) if not math.isnan(v)]  # fmt: skip


def nearest(value: float) -> int:
    """The code of a clamped quotient by exact arithmetic: nearest, ties to even, no 0x80."""
    exact = Fraction(value)
    near = min(NUMBERS, key=lambda n: (abs(Fraction(n[1]) - exact), n[0] & 1, n[0]))
    return 0 if near[1] == 0 else near[0]


@settings(max_examples=300, deadline=None)
@given(st.floats(-448, 448, width=32))
def test_codes_are_the_nearest_numbers_ties_to_even(value: float) -> None:
    code = int(encode(torch.tensor([value])).view(torch.uint8))
    assert code == nearest(value)


def test_every_midpoint_between_codes_and_its_neighbours() -> None:
    positive = sorted(v for _, v in NUMBERS if v >= 0)
    middles = [(a + b) / 2 for a, b in zip(positive, positive[1:], strict=False)]
    near = [f(np.float32(m), np.float32(d)) for m in middles
            for f, d in ((np.nextafter, 0), (np.nextafter, 999), (lambda m, _: m, 0))]  # fmt: skip
    for sign in (1, -1):
        quotients = torch.tensor(near, dtype=torch.float32) * sign
        codes = encode(quotients).view(torch.uint8).tolist()
        assert codes == [nearest(float(q)) for q in quotients]


@settings(max_examples=400, deadline=None)
@given(ROWS)
def test_any_finite_rows_come_back_within_half_a_step(rows: np.ndarray) -> None:
    weights = torch.from_numpy(rows)
    codes, scale = quantize_rows(weights)
    raw = codes.view(torch.uint8)
    assert not bool((raw == 0x80).any())
    assert not bool(((raw & 0x7F) == 0x7F).any())
    assert bool((scale.isfinite() & (scale > 0)).all())
    assert within_bounds(weights, codes, scale)
    amax = weights.abs().amax(1, keepdim=True)
    zero = (amax == 0).squeeze(1)
    assert bool((scale[zero] == 1).all())
    assert bool((raw[zero] == 0).all())
    true = torch.from_numpy(amax.numpy() / np.float32(448))
    normal = (amax >= 448 * torch.finfo(torch.float32).tiny).squeeze(1)
    assert scale[normal].equal(true[normal])
    # The row's maximum is +-448, and the values hold the sign of every weight that is not zero.
    assert bool((codes[normal].float().abs().amax(1) == 448).all())
    assert bool((values(codes) == codes.float()).all())
    made = quantize_block(weights, Measured())
    assert made is not None
    assert made[0].view(torch.uint8).equal(raw)
    assert made[1].equal(scale)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from([torch.bfloat16, torch.float16]))
def test_narrow_weights_are_quantized_as_the_numbers_they_are(
    rows: np.ndarray, dtype: torch.dtype
) -> None:
    weights = torch.from_numpy(rows).clamp(-6e4, 6e4).to(dtype)
    codes, scale = quantize_rows(weights)
    wide, wide_scale = quantize_rows(weights.float())
    assert codes.view(torch.uint8).equal(wide.view(torch.uint8))
    assert scale.equal(wide_scale)


def test_quantizing_what_was_quantized_changes_nothing() -> None:
    weights = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_rows(weights)
    again, again_scale = quantize_rows(dequantize_rows(codes, scale))
    assert torch.allclose(again_scale, scale, rtol=1e-6)
    assert again.view(torch.uint8).equal(codes.view(torch.uint8))


def test_a_wrong_code_or_scale_is_out_of_bounds() -> None:
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_rows(weights)
    for bit in range(8):
        bad = codes.clone()
        largest = int(weights[3].abs().argmax())
        bad.view(torch.uint8)[3, largest] ^= 1 << bit
        assert not within_bounds(weights, bad, scale), bit
    assert not within_bounds(weights, codes, scale * 1.2)


def test_figures_of_a_block_are_those_of_the_definitions() -> None:
    weights = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights[7] = 0
    measured = Measured()
    made = quantize_block(weights, measured)
    assert made is not None
    exact, back = weights.double(), dequantize_rows(*made).double()
    error = (exact - back).abs()
    amax = exact.abs().amax(1)
    assert measured.zero_rows == 1
    assert measured.worst == pytest.approx(
        float((error.amax(1) / amax.clamp_min(1e-30)).max()), rel=1e-4
    )
    assert measured.worst <= 1 / 28 * (1 + 1e-5)
    sqnr = 10 * math.log10(float(exact.square().sum() / error.square().sum()))
    assert measured.sqnr_db() == pytest.approx(sqnr, abs=1e-3)
    assert 25 < sqnr < 40
    quotients = weights.float() / made[1]
    assert measured.clamped == int((quotients.abs() > 448).sum())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_without_a_scale_are_not_quantized(value: float) -> None:
    weights = torch.ones(4, 8)
    weights[2, 5] = value
    assert quantize_block(weights, Measured()) is None


def fp8_of(linear: nn.Linear, form: str) -> FP8Linear:
    made = FP8Linear(linear.in_features, linear.out_features, form)  # type: ignore[arg-type]
    codes, scale = quantize_rows(linear.weight.detach())
    made.load_state_dict({"weight": codes, "weight_scale": scale}, assign=True)
    return made


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48, bias=False).requires_grad_(False)


def test_the_linear_multiplies_what_codes_and_scales_stand_for(linear: nn.Linear) -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)) * 7
    x[0, 1] = 0
    made = fp8_of(linear, "reference")
    seen = dequantize_rows(*quantize_rows(x))
    expected = seen.double() @ dequantize_rows(made.weight, made.weight_scale).double().T
    out = made(x)
    assert out.shape == (2, 3, 48)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((out[0, 1] == 0).all())
    error = (out - linear(x)).norm() / linear(x).norm()
    assert 0.005 < float(error) < 0.06  # two roundings of 3 mantissa bits, averaged


def test_torchs_kernel_gives_the_reference_up_to_bfloat16(linear: nn.Linear) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    want, got = fp8_of(linear, "reference")(x), fp8_of(linear, "scaled_mm")(x)
    assert got.dtype == torch.float32
    assert float((want - got).abs().max()) <= 2**-8 * float(want.abs().max())
    assert fp8_of(linear, "scaled_mm")(x.bfloat16()).dtype == torch.bfloat16


def test_sizes_that_the_kernel_does_not_take_are_refused_not_emulated() -> None:
    with pytest.raises(CheckpointError, match="multiples of 16"):
        FP8Linear(60, 48, "scaled_mm")
    FP8Linear(60, 48, "reference")


def test_a_cast_of_the_draft_leaves_codes_and_scales_alone(linear: nn.Linear) -> None:
    model = nn.Sequential(nn.Linear(64, 64), fp8_of(linear, "reference"))
    model.to(torch.bfloat16)
    made = model[1]
    assert model[0].weight.dtype == torch.bfloat16
    assert made.weight.dtype == CODES
    assert made.weight_scale.dtype == torch.float32


def test_installing_and_reading_back_a_plain_weight(linear: nn.Linear) -> None:
    model = nn.Sequential(nn.Sequential(linear), nn.Linear(48, 64, bias=False))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Sequential(nn.Linear(64, 48, bias=False)), nn.Linear(48, 64))
    install_fp8(empty, frozenset({"0.0"}), "reference")
    assert isinstance(empty.get_submodule("0.0"), FP8Linear)
    assert empty.get_submodule("0.0").weight.is_meta  # type: ignore[union-attr]
    plain: Tensor = plain_weight(model.get_submodule("0.0"), torch.float32)
    assert plain.equal(linear.weight)
    assert plain.data_ptr() != linear.weight.data_ptr()
    made = fp8_of(linear, "reference")
    assert plain_weight(made, torch.float32).equal(dequantize_rows(made.weight, made.weight_scale))


def test_cpus_serve_dequantized_weights_and_gpus_their_kernels() -> None:
    assert serving_form("cpu") == "dequantized"
    assert serving_form("cuda:1") == "scaled_mm"


@pytest.mark.gpu
def test_a_gpu_makes_the_same_codes_bit_for_bit() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(0)
    for exponent in (-140, -100, -30, 0, 30, 100):
        weights = torch.randn(512, 513, generator=generator) * 2.0**exponent
        codes, scale = quantize_rows(weights)
        far, far_scale = quantize_rows(weights.cuda())
        assert far_scale.cpu().equal(scale), exponent
        assert far.view(torch.uint8).cpu().equal(codes.view(torch.uint8)), exponent
