"""``quantization_config`` of a draft: FP8 with one scale a row, or a refusal.

The block is compressed-tensors' (``float-quantized``): every ``Linear`` has e4m3fn weights with a
scale per output channel and takes activations quantized per token, except those that a pattern of
``ignore`` names. Engines trust it blindly: a weight that the patterns call FP8 and the file holds
in BF16 is read as garbage, or the other way round, and the draft then has an acceptance of nothing
without any error. So patterns and files must tell the same story, tensor by tensor, and any other
scheme is refused (docs/contract.md, section 8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from dspark.checkpoint.layout import Shape
from dspark.checkpoint.tensors import FORMAT_NAMES, WEIGHT_DTYPES
from dspark.errors import CheckpointError
from dspark.model.fp8 import CODES

FIELD = "quantization_config"
SCALE = "_scale"
"""Appended to a weight's name: ``X.weight`` has ``X.weight_scale``."""
FP8 = FORMAT_NAMES[CODES]

_FP8_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {**_FP8_NUMBERS, "strategy": "channel", "dynamic": False},
    "input_activations": {**_FP8_NUMBERS, "strategy": "token", "dynamic": True},
}
"""The one scheme: per-output-channel weights, per-token activations."""
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP},
}
"""All of the block but ``ignore``."""

INERT = frozenset({"version", "global_compression_ratio", "observer", "observer_kwargs"})
"""Keys of other writers that say nothing about the numbers."""


def quantization_block(ignore: Sequence[str]) -> dict[str, Any]:
    """The value of ``quantization_config`` for these patterns."""
    return {**SCHEME, "ignore": list(ignore)}


def ignore_patterns(raw: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """Patterns of a config.json's block; None when it has no such block.

    Raises:
        CheckpointError: another scheme than ours, or a pattern that is no regular expression.
    """
    if FIELD not in raw:
        return None
    block = raw[FIELD]
    if not isinstance(block, dict):
        _refuse(where, "an object", f"a {type(block).__name__}")
    ignore = block.get("ignore")
    found = _said({key: value for key, value in block.items() if key != "ignore"})
    if found != SCHEME:
        wrong = next(k for k in (*SCHEME, *found) if found.get(k) != SCHEME.get(k))
        expected = f"FP8 with a scale per channel and per token: {wrong} {SCHEME.get(wrong)}"
        _refuse(where, expected, f"{wrong} {found.get(wrong)}"[:120])
    if not isinstance(ignore, list) or not all(isinstance(p, str) for p in ignore):
        _refuse(where, "ignore: a list of patterns", repr(ignore)[:80])
    for pattern in ignore:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            _refuse(where, "patterns that are regular expressions", f"{pattern!r}: {error}")
    return tuple(ignore)


def _said(value: Any) -> Any:
    """Without the keys that say nothing: other writers spell out unset options as null."""
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if v is not None and k not in INERT}
    return {key: _said(inner) for key, inner in kept.items()}


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Whether a pattern names ``module``, as compressed-tensors reads them.

    ``re:`` begins a regular expression that must match from the start, anything else is a whole
    name. Checkpoints leave out the ``model.`` that engines put in front: both forms are tried.
    """
    names = (module, f"model.{module}")
    return any(
        any(re.match(pattern[3:], name) for name in names)
        if pattern.startswith("re:")
        else pattern in names
        for pattern in ignore
    )


def linear_names(model: nn.Module) -> list[str]:
    """Names of all ``Linear`` modules, in the module's order."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def fp8_linears(model: nn.Module, ignore: Sequence[str] | None) -> frozenset[str]:
    """Linears of ``model`` that these patterns make FP8; none without patterns."""
    if ignore is None:
        return frozenset()
    return frozenset(name for name in linear_names(model) if not is_ignored(name, ignore))


Expected = dict[str, tuple[Shape, tuple[str, ...]]]
"""Tensor name -> shape and the dtypes it may have, as the format spells them."""


def expected_tensors(shapes: Mapping[str, Shape], fp8: frozenset[str]) -> Expected:
    """The tensors of a checkpoint whose linears ``fp8`` are quantized."""
    out: Expected = {}
    for name, shape in shapes.items():
        if name.removesuffix(".weight") in fp8:
            out[name] = shape, (FP8,)
            out[name + SCALE] = (shape[0], 1), ("F32",)
        else:
            out[name] = shape, tuple(WEIGHT_DTYPES)
    return out


def _refuse(where: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(
        expected=expected,
        found=found,
        where=f"{where}: {FIELD}",
        fix="Load the draft it was quantized from, or quantize that with `dspark quantize`.",
    )
