"""Numbers that no sound draft holds: NaN, infinity, and scales that are not positive.

One such number makes every logit NaN, and argmax of NaN is a token like any other.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from dspark.checkpoint.quantization import SCALE
from dspark.errors import CheckpointError
from dspark.model.fp8 import CODES


def require_sound(where: str, name: str, tensor: Tensor) -> None:
    """Check the numbers of a tensor, or of a piece of one.

    Raises:
        CheckpointError: names the tensor.
    """
    if tensor.dtype == CODES:
        # e4m3fn has no infinity; its NaN has all lower seven bits set.
        if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
            _refuse(where, "finite weights", f"{name} holds the code of NaN")
    elif name.endswith(f".weight{SCALE}"):
        if not bool((tensor.isfinite() & (tensor > 0)).all()):
            _refuse(where, "scales that are positive and finite", f"{name} holds others")
    # min and max carry NaN and infinity along and need no mask as large as the tensor.
    elif tensor.numel() and not bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
        _refuse(where, "finite weights", f"{name} holds NaN or infinity")


def _refuse(where: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(
        expected=expected,
        found=found,
        where=where,
        fix="Training went wrong or the file is damaged.",
    )
