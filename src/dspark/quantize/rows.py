"""One block of rows of a weight, quantized and measured.

Errors are measured against the float weights as they are quantized. "Relative error" is the largest
error of a row divided by the row's largest magnitude: at most 1/28, half the distance between the
two largest codes. Divided by the element itself it would be 1 in every real weight, because the
smallest elements of a row round to zero. SQNR is 10 log10 of the sum of squares over the sum of
squared errors.

Every figure is made of sums and maxima within single rows, joined exactly (``math.fsum``), so that
neither threads nor the size of a block change a digit of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.model.fp8 import LARGEST, VANISHING, encode, scales_of

_SHIFT = 256.0
"""Between the exponent biases of e4m3 (7) and fp16 (15)."""


def values(codes: Tensor) -> Tensor:
    """What e4m3fn codes stand for, in fp32: as ``codes.float()``, eight times faster on a CPU.

    Exponent and mantissa of a code, moved three places to the left of an fp16's mantissa, are that
    fp16's own: subnormals included, and all but the factor 2^8. NaN is not handled.
    """
    wide = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    half = (wide << 7).bitwise_and_(~0x4000).view(torch.float16)
    return half.float().mul_(_SHIFT)


@dataclass
class Measured:
    """What quantizing a whole tensor did to it, block by block."""

    zero_rows: int = 0
    clamped: int = 0
    worst: float = 0.0
    signal: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def sqnr_db(self) -> float | None:
        """None when nothing was lost."""
        noise = math.fsum(self.noise)
        return 10 * math.log10(math.fsum(self.signal) / noise) if noise else None


def quantize_block(weights: Tensor, measured: Measured) -> tuple[Tensor, Tensor] | None:
    """Rows [n, in] in float -> codes [n, in] e4m3fn and scales [n, 1] fp32; adds to ``measured``.

    None when a number is NaN or infinite.
    """
    wide = weights.float()
    amax = wide.abs().amax(1, keepdim=True)
    if not bool(amax.isfinite().all()):
        return None
    scale = scales_of(amax)
    quotients = wide / scale if wide is weights else wide.div_(scale)
    codes = encode(quotients)
    peak = amax / scale
    over = (peak > LARGEST).squeeze(1)
    if bool(over.any()):
        measured.clamped += int((quotients[over].abs() > LARGEST).sum())
    measured.zero_rows += int((amax == 0).sum())
    measured.signal += _squares(quotients, scale)
    errors = quotients.sub_(values(codes))
    measured.noise += _squares(errors, scale)
    relative = errors.abs_().amax(1, keepdim=True) / torch.where(peak == 0, 1.0, peak)
    measured.worst = max(measured.worst, float(relative.max()))
    return codes, scale


def _squares(rows: Tensor, scale: Tensor) -> list[float]:
    """Per row: the sum of squares of ``rows * scale``."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).double()
    squares: list[float] = (norm * scale.double()).square().flatten().tolist()
    return squares


def within_bounds(weights: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Whether ``codes * scale`` is as near to ``weights`` [n, in] as e4m3 allows.

    Made of torch's own casts alone, so that it does not share a fault with what it judges: half a
    unit in the last of four significant bits, or half of the smallest code; a row whose scale was
    rounded down may in addition be cut off at its end.
    """
    exact = weights.double()
    steps = scale.double()
    error = (codes.double() * steps - exact).abs()
    cut = (exact.abs() - LARGEST * steps).clamp_min(0)
    # 1e-6: the quotient itself is rounded to fp32 before it is rounded to e4m3.
    allowed = torch.maximum(exact.abs() / 16, steps * VANISHING) * (1 + 1e-6) + cut
    return bool((error <= allowed).all())
