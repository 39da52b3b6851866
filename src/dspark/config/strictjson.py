"""JSON as the standard has it: each key once, finite numbers only."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def strict_json(text: str) -> Any:
    """Parse ``text``; Python's own reader keeps the last of equal keys, and takes NaN.

    Raises:
        ValueError: not JSON, a key twice in one object, or NaN or Infinity.
        RecursionError: nested deeper than Python's stack.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def finite_json(text: str) -> Any:
    """Parse ``text`` of others; equal keys are as Python takes them.

    Raises:
        ValueError: not JSON; NaN and Infinity are none.
        RecursionError: nested deeper than Python's stack.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
