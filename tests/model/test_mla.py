"""Rotary phases, YaRN, and the two forms of latent attention."""

from __future__ import annotations

import cmath
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from dspark.config.architecture import RopeParameters
from dspark.model.layers import Rope, pack_linears, rotate
from dspark.model.mla import LatentAttention, LatentDims

DIMS = LatentDims(hidden=32, heads=4, q_lora=12, kv_lora=16, nope=8, rope=8, v=6, eps=1e-5)
YARN = RopeParameters(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def attention(rope: RopeParameters | None = None, dims: LatentDims = DIMS) -> LatentAttention:
    torch.manual_seed(3)
    return LatentAttention(dims, rope or RopeParameters(), bias=False).requires_grad_(False)


def inputs(module: LatentAttention, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, its rotation, latent rows of `keys` other tokens and x's own)."""
    generator = torch.Generator().manual_seed(5)
    weight = module.o_proj.weight
    context = torch.randn(2, keys, DIMS.hidden, generator=generator).to(weight.dtype)
    x = torch.randn(2, queries, DIMS.hidden, generator=generator).to(weight.dtype)
    positions = torch.arange(keys + queries).expand(2, -1)
    turn = module.rope.at(positions)
    rows = [module.rows(context, turn[:, :keys]), module.rows(x, turn[:, keys:])]
    return x, turn[:, keys:], torch.cat(rows, 1)


def served(
    module: LatentAttention, x: Tensor, turn: Tensor, rows: Tensor, mask: Tensor | None = None
) -> Tensor:
    """As the module's forward, rows read as they lie."""
    return module.project(module.attend_few(module.queries(x, turn), rows, mask))


def gap(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def yarn_frequencies(dim: int, p: RopeParameters) -> list[float]:
    """YaRN as its paper states it: by how often a pair turns within the original context."""
    original = p.original_max_position_embeddings or 0
    pairs = dim // 2
    plain = [p.rope_theta ** (-2 * i / dim) for i in range(pairs)]

    def index_that_turns(times: float) -> float:
        wavelength = original / times
        return dim / 2 * math.log(wavelength / (2 * math.pi), p.rope_theta)

    low = max(math.floor(index_that_turns(p.beta_fast)), 0)
    high = min(math.ceil(index_that_turns(p.beta_slow)), dim - 1)
    out = []
    for i, frequency in enumerate(plain):
        slowed = min(max((i - low) / (high - low), 0), 1)
        out.append(frequency * (1 - slowed) + frequency / p.factor * slowed)
    return out


@pytest.mark.parametrize("rope", [RopeParameters(rope_theta=50_000.0), YARN])
def test_phase_at_100_000_survives_a_bfloat16_cast(rope: RopeParameters) -> None:
    dims = LatentDims(hidden=32, heads=1, q_lora=8, kv_lora=8, nope=8, rope=64, v=8, eps=1e-5)
    module = attention(rope, dims).to(torch.bfloat16)
    assert module.o_proj.weight.dtype == torch.bfloat16
    if rope.rope_type == "yarn":
        frequencies = yarn_frequencies(64, rope)
    else:
        frequencies = [rope.rope_theta ** (-2 * i / 64) for i in range(32)]
    for position in (1, 4097, 100_000):
        got = module.rope.at(torch.tensor([position]))[0].to(torch.complex128)
        want = torch.tensor([cmath.exp(1j * position * f) for f in frequencies])
        assert float((got - want.to(torch.complex128)).abs().max()) < 1e-6
    assert float((got.abs() - 1).abs().max()) < 1e-6


def test_rotation_turns_interleaved_pairs() -> None:
    rope = Rope(4, RopeParameters(rope_theta=100.0))
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]])
    got = rotate(x, rope.at(torch.tensor([[3]])))[0, 0, 0]
    want = [math.cos(3), math.sin(3), -2 * math.sin(0.3), 2 * math.cos(0.3)]
    assert torch.allclose(got, torch.tensor(want), atol=1e-6)


def test_a_rope_built_on_the_meta_device_still_has_its_frequencies() -> None:
    with torch.device("meta"):
        built = [Rope(8, RopeParameters()), Rope(8, YARN)]
    for rope, parameters in zip(built, (RopeParameters(), YARN), strict=True):
        positions = torch.tensor([5])
        assert torch.equal(rope.at(positions), Rope(8, parameters).at(positions))


@pytest.mark.parametrize(("factor", "all_dim"), [(32.0, 1.0), (4.0, 0.5), (1.0, 1.0), (8.0, 0.0)])
def test_yarn_scales_the_softmax_as_the_contract_says(factor: float, all_dim: float) -> None:
    rope = YARN.model_copy(update={"factor": factor, "mscale_all_dim": all_dim})
    want = (DIMS.nope + DIMS.rope) ** -0.5 * (0.1 * all_dim * math.log(factor) + 1) ** 2
    assert attention(rope).scale == pytest.approx(want, rel=1e-12)
    assert attention().scale == (DIMS.nope + DIMS.rope) ** -0.5


@pytest.mark.parametrize("q_lora", [12, None])
@pytest.mark.parametrize("rope", [RopeParameters(), YARN])
def test_absorbed_equals_plain(q_lora: int | None, rope: RopeParameters) -> None:
    dims = LatentDims(32, 4, q_lora, 16, 8, 8, 6, 1e-5)
    module = attention(rope, dims)
    x, turn, rows = inputs(module, queries=3, keys=9)
    mask = torch.rand(2, 1, 3, 12, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True
    for allowed in (None, mask):
        want = module(x, turn, rows, allowed)
        assert gap(served(module, x, turn, rows, allowed), want) < 1e-5
    assert gap(module(x, turn, rows, mask), module(x, turn, rows, None)) > 0.05


def test_absorbed_follows_weights_that_change() -> None:
    module = attention()
    x, turn, rows = inputs(module, queries=3, keys=9)
    before = served(module, x, turn, rows)
    module.kv_b_proj.weight.mul_(1.5)
    after = served(module, x, turn, rows)
    assert gap(after, module(x, turn, rows, None)) < 1e-5
    assert gap(after, before) > 0.1
    half = module.to(torch.bfloat16)
    x, turn, rows = inputs(half, queries=3, keys=9)
    assert gap(served(half, x, turn, rows), half(x, turn, rows, None)) < 0.05


def test_absorbed_still_works_when_linears_are_packed() -> None:
    module = attention()
    x, turn, rows = inputs(module, queries=3, keys=9)
    want = module(x, turn, rows, None)
    module.prepare_serving()
    assert pack_linears(module, torch.float32) == 5
    assert "kv_b_proj.weight" not in module.state_dict()
    assert gap(served(module, x, turn, rows), want) < 1e-5
    assert gap(module(x, turn, rows, None), want) < 1e-5


@pytest.mark.parametrize("form", ["plain", "absorbed"])
def test_a_query_that_may_attend_to_nothing_gives_zeros(form: str) -> None:
    module = attention()
    x, turn, rows = inputs(module, queries=3, keys=9)
    mask = torch.ones(2, 1, 3, 12, dtype=torch.bool)
    mask[0, :, 1] = False
    attend = module if form == "plain" else partial(served, module)
    out = attend(x, turn, rows, mask)
    assert torch.equal(out[0, 1], torch.zeros(DIMS.hidden))
    free = attend(x, turn, rows, None)
    assert gap(out[1], free[1]) < 1e-6
    assert gap(out[0, [0, 2]], free[0, [0, 2]]) < 1e-6


def test_causal_equals_the_triangular_mask() -> None:
    module = attention()
    x, turn, rows = inputs(module, queries=6, keys=0)
    triangle = torch.ones(6, 6, dtype=torch.bool).tril()
    want = module(x, turn, rows, triangle)
    assert gap(module(x, turn, rows, None, causal=True), want) < 1e-6
