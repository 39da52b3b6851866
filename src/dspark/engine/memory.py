"""How much memory cached rows take, and how many pages fit into what was granted."""

from __future__ import annotations

from dspark.config.engine import EngineOptions
from dspark.engine.drafter import Drafter
from dspark.model.target import DecoderTarget, Target


def bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    """Bytes of one token's rows in every layer of target and draft.

    A target behind the transformers adapter keeps rows of its own, counted as whole hidden vectors
    for keys and values.
    """
    if isinstance(target, DecoderTarget):
        elements = sum(heads * width for heads, width in target.row_parts) * target.num_layers
    else:
        elements = 2 * target.hidden_size * target.num_layers
    total = elements * target.dtype.itemsize
    if drafter is not None:
        total += drafter.layers * drafter.row_width * drafter.dtype.itemsize
    return total


def page_count(target: Target, drafter: Drafter | None, options: EngineOptions) -> int:
    """Pages that fit into ``cache_gib``, at most ``max_requests`` whole contexts, at least one."""
    per_page = bytes_per_token(target, drafter) * options.page_size
    fits = int(options.cache_gib * 2**30) // per_page
    whole = -(-target.max_context // options.page_size) * options.max_requests
    return max(1, min(fits, whole))
