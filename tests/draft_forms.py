"""The two forms of a draft's block pass, which must agree: training's and serving's."""

from __future__ import annotations

from torch import Tensor

from dspark.model.draft import DSparkDraft
from dspark.model.spans import BlockContext


def states_of(
    draft: DSparkDraft, ids: Tensor, positions: Tensor, rows: list[Tensor], *, serving: bool
) -> Tensor:
    """States [B, K, H] of one block each, over all of ``rows`` [B, N, row] per layer."""
    if serving:
        return draft.serve(ids, positions, [BlockContext(rows)])
    return draft.backbone(ids, positions, rows, None)
