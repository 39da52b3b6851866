"""Tapped layers: which ids are valid, which are the default, and how every other tool counts them.

Our layer id i, 0-based, means the residual stream AFTER decoder layer i, before any norm
(docs/contract.md, section 2). Other tools count the same streams differently, some under nearly the
same key, and one layer off costs most of a draft's acceptance without any error. So nobody adds
one by hand: every number that leaves or enters goes through :func:`to_convention` and
:func:`from_convention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal, get_args

LayerConvention = Literal[
    "target_layer_ids",
    "hf_hidden_states",
    "vllm_aux_hidden_state_layers",
    "eagle_aux_hidden_state_layer_ids",
    "speculators_aux_hidden_state_layer_ids",
]
"""Where a list of layers stands, and so how it counts.

- ``target_layer_ids``: a draft's config.json, DeepSpec, TorchSpec, SpecForge, ATOM and vLLM's
  ``target_layer_ids`` (vLLM adds its 1 itself). As ours.
- ``hf_hidden_states``: index of Hugging Face's ``hidden_states``, whose entry 0 is the embedding.
- ``vllm_aux_hidden_state_layers``: vLLM's internal list of tapped layers.
- ``eagle_aux_hidden_state_layer_ids``: vLLM's key for drafts of the eagle kind.
- ``speculators_aux_hidden_state_layer_ids``: ``aux_hidden_state_layer_ids`` of speculators.
"""

CONVENTIONS: tuple[LayerConvention, ...] = get_args(LayerConvention)


def _shift(convention: LayerConvention) -> int:
    """What is added to our id: all but one count the embedding's output as number 0."""
    return 0 if convention == "target_layer_ids" else 1


def to_convention(ids: Iterable[int], convention: LayerConvention) -> tuple[int, ...]:
    """Our layer ids in the numbers of ``convention``."""
    return tuple(i + _shift(convention) for i in ids)


def from_convention(numbers: Iterable[int], convention: LayerConvention) -> tuple[int, ...]:
    """Our layer ids of ``numbers`` that another tool wrote.

    Raises:
        ValueError: a number names the embedding's output or nothing, which no layer id is.
    """
    numbers = tuple(numbers)
    ids = tuple(n - _shift(convention) for n in numbers)
    if any(i < 0 for i in ids):
        raise ValueError(
            f"{convention} {list(numbers)} names the embedding's output, which is no decoder layer"
        )
    return ids


def check_layer_order(ids: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ids are non-negative and strictly increasing.

    This is what a recipe alone can know; :func:`check_layer_ids` adds the target's depth.
    """
    if not ids:
        raise ValueError("target_layer_ids: at least one tapped layer id is needed")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise ValueError(
            f"target_layer_ids: layer ids must be strictly increasing and unique, found {list(ids)}"
        )
    if ids[0] < 0:
        raise ValueError(f"target_layer_ids: layer id {ids[0]} is negative")


def check_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """Raise ``ValueError`` unless ids are strictly increasing and inside ``[0, num_layers - 2]``.

    The last layer is refused because Hugging Face returns it after the final norm and engines
    before it: no two tools agree on what "layer N-1" holds.
    """
    check_layer_order(ids)
    high = ids[-1]
    if high == num_layers - 1:
        raise ValueError(
            f"target_layer_ids: layer id {high} is the last of {num_layers} layers: Hugging Face "
            "gives it after the final norm and engines before it; the highest usable id is "
            f"{num_layers - 2}"
        )
    if high > num_layers - 2:
        raise ValueError(f"target_layer_ids: layer id {high} is outside [0, {num_layers - 2}]")


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` ids evenly spaced from 1 to ``num_layers - 3``, rounded (contract, section 2).

    Shallow targets that cannot hold ``count`` distinct ids get as many as they can.
    """
    low, high = 1, num_layers - 3
    if high < low:
        return tuple(range(max(num_layers - 1, 0)))[:1]
    if count == 1:
        return (high,)
    step = (high - low) / (count - 1)
    return tuple(sorted({round(low + i * step) for i in range(count)}))
