"""Small parts that the draft and the target share: RMSNorm, rotary embedding, SwiGLU, linears.

Rotary embedding is one complex multiplication, of interleaved pairs (:func:`rotate`). Targets whose
checkpoints use the half-split ("neox") layout are permuted once at load time
(``dspark.model.weights``): dot products are invariant. A qwen3 draft keeps the half-split layout
(:func:`rotate_halves`), so that its parameters are the published ones at any moment.

Linears on CPU are prepacked for oneDNN at inference (:func:`pack_linears`): an unpacked weight is
re-packed on every call, which makes verifying 8 tokens cost 2.1 forwards instead of 1.3. Norms are
replaced with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config.architecture import RopeParameters
from dspark.config.hybrid import SituConfig


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, computed in fp32. Shapes are kept."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        wide = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1`` (YaRN), 1 for factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Rope:
    """Rotary frequencies of one attention. Not a module: a dtype cast must not round them.

    Frequencies are float64 and become fp32 only after multiplication with the position, so that
    the phase stays exact to 1e-7 relative at position 100,000 (field bug: bf16 frequencies).
    """

    def __init__(self, dim: int, parameters: RopeParameters) -> None:
        self.dim = dim
        self.parameters = parameters
        # On the CPU by name: models are also built under torch.device("meta").
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        base = parameters.rope_theta**exponents
        self._inverse = 1.0 / base
        self._amplitude = 1.0
        if parameters.rope_type == "yarn":
            self._inverse = self._yarn(base)
            self._amplitude = yarn_mscale(parameters.factor, parameters.mscale) / yarn_mscale(
                parameters.factor, parameters.mscale_all_dim
            )

    def _yarn(self, base: Tensor) -> Tensor:
        """Blend interpolated and original frequencies between the two correction dimensions."""
        p = self.parameters
        length = p.original_max_position_embeddings or 1

        def correction(rotations: float) -> float:
            ratio = length / (rotations * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(p.rope_theta))

        low = max(math.floor(correction(p.beta_fast)), 0)
        high = min(math.ceil(correction(p.beta_slow)), self.dim - 1)
        span = max(high - low, 0.001)
        steps = torch.arange(self.dim // 2, dtype=torch.float64, device="cpu")
        ramp = ((steps - low) / span).clamp(0, 1)
        return ramp / (p.factor * base) + (1 - ramp) / base

    @property
    def softmax_factor(self) -> float:
        """Multiplier of the softmax scale: ``(0.1 * mscale_all_dim * ln(factor) + 1)^2``."""
        if self.parameters.rope_type != "yarn" or self.parameters.mscale_all_dim == 0:
            return 1.0
        return yarn_mscale(self.parameters.factor, self.parameters.mscale_all_dim) ** 2

    def at(self, positions: Tensor) -> Tensor:
        """Complex rotations for ``positions`` [..., T] -> complex64 [..., T, dim/2]."""
        if self._inverse.device != positions.device:
            self._inverse = self._inverse.to(positions.device)
        phase = positions.unsqueeze(-1).double() * self._inverse
        return torch.polar(torch.full_like(phase, self._amplitude), phase).to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotations [..., T, d/2] to interleaved pairs of x [..., T, heads, d]."""
    pairs = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
    return torch.view_as_real(pairs * rotation.unsqueeze(-2)).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotations [..., T, d/2] to x [..., T, heads, d], element i paired with i + d/2."""
    real, imaginary = x.float().chunk(2, -1)
    turned = torch.complex(real, imaginary) * rotation.unsqueeze(-2)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def situ(gate: Tensor, up: Tensor, config: SituConfig) -> Tensor:
    """K3's gated activation, in float32 (moonshotai/Kimi-K3, ``SituAndMul``)."""
    wide = gate.float()
    out = config.beta * torch.tanh(wide / config.beta) * wide.sigmoid()
    linear = up.float()
    if config.linear_beta is not None:
        linear = config.linear_beta * torch.tanh(linear / config.linear_beta)
    return (out * linear).to(up.dtype)


class FusedMLP(nn.Module):
    """SwiGLU (or K3's :func:`situ`) with gate and up joined in one product."""

    def __init__(self, hidden: int, intermediate: int, situ: SituConfig | None = None) -> None:
        super().__init__()
        self.situ = situ
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        mixed = F.silu(gate) * up if self.situ is None else situ(gate, up, self.situ)
        out: Tensor = self.down_proj(mixed)
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, no biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class PackedLinear(nn.Module):
    """A frozen linear whose weight lies in oneDNN's blocked layout. Inference on CPU only.

    With ``dtype`` bfloat16 under fp32 activations only the product is rounded: the residual stream
    (values of thousands in small models) stays fp32, at half the memory traffic.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._dtype = dtype
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().to(dtype).contiguous()
        )
        self._bias = None if bias is None else bias.detach().to(dtype)
        # The overload itself: four look-ups less on a path that is called 120 times a token.
        self._operator = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self._dtype:
            return self._product(x)
        return self._product(x.to(self._dtype)).to(x.dtype)

    def _product(self, rows: Tensor) -> Tensor:
        out: Tensor = self._operator(rows, self._packed, self._bias, "none", [], "")
        return out


class PackedNorm(RMSNorm):
    """RMSNorm of fp32 rows on CPU in four kernels; ``F.rms_norm`` takes eight there.

    ``x / hypot(|x|, sqrt(n eps)) * (weight sqrt(n))`` is the same formula with the mean multiplied
    out (7.7 instead of 17.8 microseconds for one row of 576). Inference only: ``|x|`` has no
    gradient at 0. Other dtypes go the ordinary way.
    """

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps
        size = self.weight.numel()
        self._scaled = self.weight.detach() * size**0.5
        self._floor = torch.tensor((size * norm.eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or self._scaled.dtype != torch.float32:
            return super().forward(x)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out: Tensor = x / torch.hypot(length, self._floor) * self._scaled
        return out


def packed_or_plain(linear: nn.Linear, dtype: torch.dtype) -> nn.Module:
    """The packed twin of ``linear`` when it works here and agrees with it, else ``linear``.

    The operator is private to torch, so it is probed with real numbers rather than trusted.
    """
    weight = linear.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return linear
    try:
        packed = PackedLinear(weight, linear.bias, dtype)
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype).expand(2, -1)
        with torch.no_grad():
            want, got = linear(probe), packed(probe)
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    scale = want.abs().max().clamp_min(1e-6)
    return packed if bool(((want - got).abs().max() / scale) <= tolerance) else linear


def pack_linears(module: nn.Module, dtype: torch.dtype) -> int:
    """Replace every ``nn.Linear`` below ``module`` by its packed twin, and norms on CPU by theirs.

    Returns how many linears changed.
    """
    changed = 0
    for name, child in module.named_children():
        if isinstance(child, RMSNorm):
            if child.weight.device.type == "cpu":
                setattr(module, name, PackedNorm(child))
        elif isinstance(child, nn.Linear):
            twin = packed_or_plain(child, dtype)
            setattr(module, name, twin)
            changed += twin is not child
        else:
            changed += pack_linears(child, dtype)
    return changed
