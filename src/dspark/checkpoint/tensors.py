"""Between the bytes of a safetensors file and torch tensors.

Little-endian machines only, as every machine that runs torch today: the format is little-endian and
the bytes are used as they lie.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from dspark.checkpoint.tensorfile import TensorEntry
from dspark.errors import CheckpointError

WEIGHT_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
"""Format name -> torch dtype of the weights a draft may hold."""

TORCH_DTYPES = {
    **WEIGHT_DTYPES,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Format name -> torch dtype of everything that can be read."""

FORMAT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_tensor(entry: TensorEntry, raw: bytearray) -> Tensor:
    """A tensor that owns ``raw``, which must hold exactly the entry's bytes.

    Raises:
        CheckpointError: a dtype that torch has no use for.
    """
    if entry.dtype not in TORCH_DTYPES:
        raise CheckpointError(
            expected=f"a dtype among {', '.join(TORCH_DTYPES)}",
            found=entry.dtype,
            where=f"tensor {entry.name}",
            fix="The file is of another format.",
        )
    dtype = TORCH_DTYPES[entry.dtype]
    if not raw:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as they go into a file, without a copy."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


def digest_of(tensor: Tensor) -> dict[str, str]:
    """``dtype`` (as the format spells it) and ``sha256`` of a contiguous CPU tensor's bytes."""
    return {
        "dtype": FORMAT_NAMES[tensor.dtype],
        "sha256": hashlib.sha256(raw_bytes(tensor)).hexdigest(),
    }
