"""Parity oracle: the layout that trains and the layout that serves are the same function.

Public drafts were trained with labels or positions shifted against inference while every loss curve
looked excellent; only this comparison sees it. Training side: all blocks of a sequence in one pass
under the dense mask. Serving side: context rows of the tokens before the anchor, one block pass
without a mask, then the Markov head token by token.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    BLOCK,
    DRAFTS,
    answer,
    one_thread,  # noqa: F401 (autouse)
    record_of,
    tiny_draft,
    tiny_target,
)
from torch import Tensor

from draft_forms import states_of
from dspark.engine.drafter import Drafter
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.spans import BlockContext
from dspark.training.anchors import build_blocks
from dspark.training.step import block_states

TOLERANCE = 1e-5
PROMPT, ANSWER = 5, 18
TARGET = tiny_target()
HEAD = TARGET.head_weight()


@pytest.fixture(scope="module")
def record() -> HiddenRecord:
    generator = torch.Generator().manual_seed(4)
    return record_of(
        TARGET, answer(TARGET, [3, 14, 15, 92, 65], ANSWER, generator), PROMPT, name="one"
    )


@pytest.fixture(params=DRAFTS, ids="-".join)
def draft(request: pytest.FixtureRequest) -> DSparkDraft:
    return tiny_draft(*request.param, target=TARGET).eval()


ANCHORS = [PROMPT, PROMPT + 1, PROMPT + 7, PROMPT + ANSWER - 2 - BLOCK]


@torch.no_grad()
def training_layout(draft: DSparkDraft, record: HiddenRecord) -> tuple[Tensor, Tensor]:
    """States [A, K, H] and teacher-forced logits [A, K, V] of every anchor, in one pass.

    A longer record beside it makes the row a padded one, as in real batches.
    """
    longer = record_of(TARGET, [*record.ids.tolist(), 1, 2, 3], PROMPT, name="longer")
    chosen = torch.tensor(ANCHORS)
    blocks = build_blocks([record, longer], [chosen, chosen[:2]], BLOCK)
    h = block_states(draft, blocks)
    m, _ = draft.markov_head.block(blocks.previous, h)
    logits = h @ HEAD.T + draft.markov_head.markov_w2(m)
    return h[0], logits[0]


@torch.no_grad()
def serving_layout(
    draft: DSparkDraft,
    record: HiddenRecord,
    anchor: int,
    *,
    serving: bool,
    context: int | None = None,
    shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """States [K, H] and logits [K, V] as an engine computes them, one slot after the other.

    ``context`` and ``shift`` break it on purpose: context length and block positions.
    """
    known = record.taps[: anchor if context is None else context].unsqueeze(0)
    seen = torch.arange(known.shape[1]).unsqueeze(0)
    rows = draft.context_rows(draft.context(known), seen)
    positions = (torch.arange(anchor, anchor + BLOCK) + shift).unsqueeze(0)
    ids = draft.block_ids(record.ids[anchor].long().view(1))
    h = states_of(draft, ids, positions, rows, serving=serving)[0]
    state, logits = draft.markov_head.start(h[0]), []
    for k in range(BLOCK):
        previous = record.ids[anchor + k].long()
        m, _, state = draft.markov_head.step(previous, h[k], state)
        logits.append(h[k] @ HEAD.T + draft.markov_head.markov_w2(m))
    return h, torch.stack(logits)


def distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Largest difference relative to the size of what is compared."""
    return max(
        float((x - y).abs().max() / y.abs().max().clamp_min(1)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("serving", [False, True])
def test_training_layout_equals_serving_layout(
    draft: DSparkDraft, record: HiddenRecord, serving: bool
) -> None:
    h, logits = training_layout(draft, record)
    for i, anchor in enumerate(ANCHORS):
        served = serving_layout(draft, record, anchor, serving=serving)
        assert distance((h[i], logits[i]), served) < TOLERANCE


def test_every_wrong_layout_would_be_noticed(draft: DSparkDraft, record: HiddenRecord) -> None:
    h, logits = training_layout(draft, record)
    for i, anchor in enumerate(ANCHORS):
        trained = (h[i], logits[i])
        wrong = {
            "positions shifted by one": serving_layout(
                draft, record, anchor, serving=False, shift=1
            ),
            "the anchor's own state in the context": serving_layout(
                draft, record, anchor, serving=False, context=anchor + 1
            ),
            "one context row missing": serving_layout(
                draft, record, anchor, serving=False, context=anchor - 1
            ),
            "the next anchor": serving_layout(draft, record, anchor + 1, serving=False),
        }
        for name, served in wrong.items():
            assert distance(trained, served) > 100 * TOLERANCE, name


@torch.no_grad()
def test_the_engines_drafter_drafts_what_training_saw(
    draft: DSparkDraft, record: HiddenRecord
) -> None:
    """The real serving class with packed linears, block by block and all blocks in one batch."""
    h, _ = training_layout(draft, record)
    drafter = Drafter(draft, HEAD)
    pieces = [
        drafter.context_rows(record.taps[:4], torch.arange(4)),
        drafter.context_rows(record.taps[4:], torch.arange(4, len(record))),
    ]
    rows = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    for i, anchor in enumerate(ANCHORS):
        at = torch.tensor([anchor])
        context = [layer[:anchor].unsqueeze(0) for layer in rows]
        served = drafter.block_states(record.ids[at].long(), at, [BlockContext(context)])[0]
        assert float((served - h[i]).abs().max()) < TOLERANCE * float(h[i].abs().max())
    widest = max(ANCHORS)
    blocks = torch.tensor(ANCHORS)
    context = [layer[:widest].expand(len(ANCHORS), -1, -1) for layer in rows]
    padded = BlockContext.padded(context, blocks, BLOCK)
    together = drafter.block_states(record.ids[blocks].long(), blocks, [padded])
    assert float((together - h).abs().max()) < TOLERANCE * float(h.abs().max())
