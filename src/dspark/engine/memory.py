"""How much memory cached rows take, and how many pages fit into what was granted."""

from __future__ import annotations

from dspark.config.engine import EngineOptions
from dspark.engine.drafter import Drafter
from dspark.errors import DecodingError
from dspark.model.target import DecoderTarget, Target


def bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    """Bytes of one token's rows in every layer of target and draft.

    A target behind the transformers adapter keeps rows of its own, counted as whole hidden vectors
    for keys and values.
    """
    if isinstance(target, DecoderTarget):
        elements = sum(heads * width for heads, width in target.row_parts) * target.row_layers
    else:
        elements = 2 * target.hidden_size * target.num_layers
    total = elements * target.dtype.itemsize
    if drafter is not None:
        total += drafter.layers * drafter.row_width * drafter.dtype.itemsize
    return total


def state_bytes(target: Target, options: EngineOptions) -> int:
    """Bytes of a hybrid target's recurrent states, running and kept; 0 for other targets."""
    dims = target.state_dims if isinstance(target, DecoderTarget) else None
    if dims is None:
        return 0
    kept = options.state_snapshots if options.prefix_cache else 0
    return dims.bytes * (options.max_requests + kept)


def page_count(target: Target, drafter: Drafter | None, options: EngineOptions) -> int:
    """Pages that fit into ``cache_gib``, at most ``max_requests`` whole contexts, at least one.

    Raises:
        DecodingError: the states of a hybrid target leave nothing for pages.
    """
    per_page = bytes_per_token(target, drafter) * options.page_size
    states = state_bytes(target, options)
    left = int(options.cache_gib * 2**30) - states
    if states and left < per_page:
        raise DecodingError(
            expected="a cache that holds the recurrent states and at least one page",
            found=f"{states / 2**30:.3f} GiB of states, {options.cache_gib:g} GiB in all",
            where="engine options",
            fix="Raise cache_gib, or lower max_requests or state_snapshots.",
        )
    fits = left // per_page
    whole = -(-target.max_context // options.page_size) * options.max_requests
    return max(1, min(fits, whole))
