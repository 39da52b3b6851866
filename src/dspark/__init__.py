"""dspark trains, proves, serves and measures DSpark drafts.

Importing the package imports neither torch nor transformers, so the command line answers at once;
``Engine`` brings them when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.api import Engine
    from dspark.decoding.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from dspark.api import Engine

        return Engine
    if name == "SamplingParams":
        from dspark.decoding.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")
