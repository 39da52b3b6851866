"""FP8 rows (e4m3fn codes with one fp32 scale a row), and a linear that runs on them.

The same few lines make the codes of weights, one row per output channel, and of activations, one
row per token: together "PTPC". A row's largest magnitude becomes 448, the largest e4m3 number:

    scale = amax / 448            fp32, true division; 1 for a row of zeros
    code  = e4m3(clamp(x / scale, -448, 448))     round to nearest, ties to even

Clamping comes before the cast because ``amax / scale`` may round to more than 448, and e4m3fn has
no infinity to saturate at: some casts make NaN of it. Negative zero (0x80) is never made: it is NaN
in the ``fnuz`` variant of the format, which some GPUs use. Quotients that would round to zero are
set to zero before the cast. All steps are IEEE operations of single elements, so that codes are the
same on every device and for any number of threads (docs/contract.md, section 8).

Speed decides how a draft is served: on a CPU an FP8 product is emulated and 30 to 80 times slower
than the packed product of dequantised weights (7 rows, 576x1536 to 7168x14336), so there weights
are dequantised once, when they are loaded. Tensor cores multiply the codes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.errors import CheckpointError

Fp8Form = Literal["dequantized", "reference", "scaled_mm"]
"""How FP8 weights are run: as plain linears of the values they stand for, or as FP8 products with
quantized activations, computed in fp32 ("reference") or by torch's kernel ("scaled_mm")."""

CODES = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest e4m3fn number."""
VANISHING = 2.0**-10
"""Half of the smallest e4m3fn number: magnitudes up to here round to zero (the tie is to even)."""
SMALLEST_SCALE = 2.0**-149
"""Smallest positive fp32 number: below 448 of it, ``amax / 448`` would round to zero."""
MULTIPLE = 16
"""torch's FP8 kernels take sizes that are multiples of this."""


def scales_of(amax: Tensor) -> Tensor:
    """fp32 scales of rows with these largest magnitudes; not finite where those are not."""
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which rounds otherwise.
    scale = (amax / torch.full_like(amax, LARGEST)).clamp_min(SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def encode(quotients: Tensor) -> Tensor:
    """e4m3fn codes of fp32 ``x / scale``; see the module docstring."""
    return F.hardshrink(quotients.clamp(-LARGEST, LARGEST), VANISHING).to(CODES)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [..., n] of any float dtype -> codes [..., n] e4m3fn and scales [..., 1] fp32."""
    wide = x.float()
    scale = scales_of(wide.abs().amax(-1, keepdim=True))
    return encode(wide / scale), scale


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """The fp32 numbers that codes [..., n] with scales [..., 1] stand for."""
    return codes.float() * scale


class FP8Linear(nn.Module):
    """A frozen linear without bias on FP8 weights; activations are quantized per token.

    Buffers are named as in checkpoints: ``weight`` [out, in] of codes, ``weight_scale`` [out, 1].
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, form: Literal["reference", "scaled_mm"]
    ) -> None:
        """Without numbers: they come from a state dict.

        Raises:
            CheckpointError: sizes that torch's kernel does not take.
        """
        super().__init__()
        if form == "scaled_mm" and (in_features % MULTIPLE or out_features % MULTIPLE):
            raise CheckpointError(
                expected=f"sizes that are multiples of {MULTIPLE}, which FP8 products need",
                found=f"a linear of {in_features} inputs and {out_features} outputs",
                where="FP8 weights",
                fix="Run this draft with dequantized weights.",
            )
        self.in_features, self.out_features, self.form = in_features, out_features, form
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=CODES))
        self.register_buffer("weight_scale", torch.empty(out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        codes, scale = quantize_rows(x.flatten(0, -2))
        if self.form == "scaled_mm":
            # Kernels for one scale a row give bfloat16 only.
            out = torch._scaled_mm(
                codes, self.weight.t(), scale, self.weight_scale.t(), out_dtype=torch.bfloat16
            )
        else:
            out = codes.float() @ self.weight.float().t() * scale * self.weight_scale.t()
        return torch.unflatten(out.to(x.dtype), 0, x.shape[:-1])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] as plain numbers."""
        return dequantize_rows(self.weight, self.weight_scale).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        # Codes and scales mean nothing in another dtype: of a cast only the device is followed.
        device = fn(torch.empty(0, device=self.weight.device)).device
        self.weight = self.weight.to(device)
        self.weight_scale = self.weight_scale.to(device)
        return self


def serving_form(device: str | torch.device) -> Fp8Form:
    """The fastest way to run FP8 weights there; see the module docstring for the figures."""
    return "scaled_mm" if torch.device(device).type == "cuda" else "dequantized"


def install_fp8(
    model: nn.Module, names: frozenset[str], form: Literal["reference", "scaled_mm"]
) -> None:
    """Replace the linears called ``names`` below ``model`` by FP8 ones, on the same device."""
    for name in sorted(names):
        parent, _, child = name.rpartition(".")
        home = model.get_submodule(parent)
        plain = home.get_submodule(child)
        assert isinstance(plain, nn.Linear)
        with torch.device(plain.weight.device):
            home._modules[child] = FP8Linear(plain.in_features, plain.out_features, form)


def plain_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a linear, FP8 or not, as a tensor of its own in ``dtype``."""
    if isinstance(linear, FP8Linear):
        return linear.dequantized(dtype)
    assert isinstance(linear, nn.Linear)
    return linear.weight.detach().to(dtype, copy=True)
