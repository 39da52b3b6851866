"""Faults under the names that the user typed.

Library code names a setting as recipes do. A verb that has no recipe sets the same thing through an
option, and its user has never heard of the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dspark.errors import DSparkError


@contextmanager
def options_named(options: Mapping[str, str]) -> Iterator[None]:
    """Raise errors of the block with recipe keys replaced by ``options`` (key to option).

    Raises:
        DSparkError: of the same kind.
    """
    try:
        yield
    except DSparkError as error:
        parts = (error.expected, error.found, error.where, error.fix)
        if not any(key in part for key in options for part in parts):
            raise
        expected, found, where, fix = (_renamed(part, options) for part in parts)
        raise type(error)(expected=expected, found=found, where=where, fix=fix) from error


def _renamed(text: str, options: Mapping[str, str]) -> str:
    for key, option in options.items():
        text = text.replace(key, option)
    return text
