"""The train stage: from hidden records to a finished draft.

Order matters and is the same every time: prove the states (self-test), choose the draft
vocabulary, initialise, warm-start, train, fold the vocabulary into the spare Markov rank. A draft
that continues another one takes weights and vocabulary from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.config.architecture import DraftConfig
from dspark.config.recipe import TrainSection
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.model.support import clear_spare_rank, fold_support
from dspark.training.batches import split_validation
from dspark.training.contextstart import warm_start_context
from dspark.training.parallel import Solo
from dspark.training.selftest import Agreement, require_sound_states
from dspark.training.streamed import StreamPlan
from dspark.training.trainer import Decode, OnStep, Trainer
from dspark.training.warmstart import Spoken, choose_support, continue_from, warm_start_markov


@dataclass(frozen=True)
class TargetParts:
    """What training borrows from the target: lm_head [V, H], embedding [V, H] and final norm."""

    head: Tensor
    embedding: Tensor
    norm: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TrainedDraft:
    """A finished draft, its history (``training.json``) and what was found on the way."""

    draft: DSparkDraft
    history: dict[str, list[dict[str, Any]]]
    agreement: Agreement
    support_size: int
    parameters: int


@dataclass(frozen=True)
class AnswerTokens:
    """An answer whose states are still to come: ids [S] and loss mask [S]."""

    ids: Tensor
    loss_mask: Tensor

    @staticmethod
    def of(row: Row) -> AnswerTokens:
        mask = torch.tensor(row.mask, dtype=torch.uint8)
        return AnswerTokens(torch.tensor(row.ids, dtype=torch.int32), mask)


@dataclass(frozen=True)
class Looked:
    """What a run looks at before its first step, states normed.

    ``tested`` proves the states; ``fitted`` starts are fitted on, ``counted`` tokens counted in;
    ``judged`` is held back from all of them. ``trained`` are the records a plan is made of (with
    ``judged`` among them), or only ``judged`` when a stream brings the rest.
    """

    tested: Sequence[HiddenRecord]
    fitted: Sequence[HiddenRecord]
    counted: Sequence[Spoken]
    judged: Sequence[HiddenRecord]
    trained: Sequence[HiddenRecord]


def look_at_records(records: Sequence[HiddenRecord], target: TargetParts) -> Looked:
    """All states are here."""
    normed = [_after_norm(record, target) for record in records]
    # Nothing that is fitted may see the answers the draft is judged on.
    fitted, judged = split_validation(normed)
    return Looked(records, fitted, fitted, judged, normed)


def look_at_stream(plan: StreamPlan, target: TargetParts) -> Looked:
    """Ask a stream for a few rows; tokens of cached answers are known without their states."""
    held, warm = plan.take_held(), plan.take_warm()
    normed = [_after_norm(record, target) for record in warm]
    judged = [_after_norm(record, target) for record in held]
    known = [AnswerTokens.of(row) for row in plan.rows if not row.new_tokens]
    return Looked([*warm, *held], normed, known or normed, judged, judged)


def train_draft(
    config: DraftConfig,
    target: TargetParts,
    records: Sequence[HiddenRecord] | StreamPlan,
    section: TrainSection,
    folder: Path,
    *,
    vocabulary_size: int | None,
    start: DSparkDraft | None = None,
    on_step: OnStep = lambda *_: None,
    on_note: Callable[[str], None] = lambda _: None,
    group: Solo | None = None,
    decode: Decode | None = None,
) -> TrainedDraft:
    """Train one draft; resumes from ``folder`` when a training state lies there.

    ``records`` are all here, or an opened stream brings them. ``start`` is a finished draft of the
    same sizes whose weights are the first ones.

    Raises:
        TrainingError: records or ``start`` do not fit, or the loss became non-finite.
        SelfTestError: the states are not the target's.
        StreamError: a stage of the stream stands still.
    """
    plan = records if isinstance(records, StreamPlan) else None
    if isinstance(records, StreamPlan):
        records.normed = lambda record: _after_norm(record, target)
        looked = look_at_stream(records, target)
    else:
        looked = look_at_records(records, target)
    _require_layers(config, looked.tested)
    agreement = require_sound_states(looked.tested, target.head, target.norm)
    on_note(
        f"self-test: states {agreement.states:.2%} of {agreement.states_positions}, "
        f"order {agreement.order:.2%} of {agreement.order_positions} positions"
    )
    draft = initialise(DSparkDraft(config), target.embedding, section.seed)
    support = _start(draft, looked, section, vocabulary_size, start, on_note)
    draft = draft.to(target.head.device)
    trainer = Trainer(
        draft,
        target.head,
        looked.trained,
        section,
        folder,
        support,
        plan=plan,
        group=group,
        decode=None if decode is None else folded(decode, support),
    )
    history = trainer.run(on_step)
    draft = trainer.finished()
    if support is not None:
        fold_support(draft, support)
    trainable = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    size = config.vocab_size if support is None else len(support)
    return TrainedDraft(draft.eval(), history, agreement, size, trainable)


def folded(decode: Decode, support: Tensor | None) -> Decode:
    """``decode`` of drafts as they are written: with their vocabulary in the spare rank."""

    def run(draft: DSparkDraft) -> float:
        if support is not None:
            fold_support(draft, support)
        return decode(draft)

    return run


def _start(
    draft: DSparkDraft,
    looked: Looked,
    section: TrainSection,
    vocabulary_size: int | None,
    start: DSparkDraft | None,
    on_note: Callable[[str], None],
) -> Tensor | None:
    """First weights of ``draft``, and the ids of its vocabulary."""
    support = None
    if start is not None:
        support = continue_from(draft, start, vocabulary_size)
    elif vocabulary_size is not None:
        support = choose_support(looked.counted, draft.config.vocab_size, vocabulary_size)
    if support is not None:
        clear_spare_rank(draft)
        covered = support_coverage(looked.judged, support)
        on_note(f"draft vocabulary: {len(support)} tokens, {covered:.2%} of held-back answers")
    if section.warm_start.markov:
        warm_start_markov(draft, looked.counted, support)
    if section.warm_start.context:
        warm_start_context(draft, looked.fitted, section.seed)
    return support


def _require_layers(config: DraftConfig, records: Sequence[HiddenRecord]) -> None:
    """Layer ids travel with every record; one off by one here costs most of the acceptance."""
    for record in records:
        if record.layer_ids != config.target_layer_ids:
            raise TrainingError(
                expected=f"states of layers {list(config.target_layer_ids)}",
                found=f"states of layers {list(record.layer_ids)}",
                where=f"hidden record {record.id}",
                fix="Capture again with this recipe.",
            )


@torch.no_grad()
def _after_norm(record: HiddenRecord, target: TargetParts) -> HiddenRecord:
    """The record with its final norm applied; the loss only ever sees normed states."""
    if record.norm_state == "post":
        return record
    h = record.final.to(target.head.device, target.head.dtype)
    final = target.norm(h).to("cpu", record.final.dtype)
    return replace(record, final=final, norm_state="post")


@torch.inference_mode()
def support_coverage(records: Sequence[HiddenRecord], support: Tensor) -> float:
    """Share of answer tokens that lie in the draft vocabulary."""
    inside = total = 0
    for record in records:
        answer = record.ids[record.loss_mask.bool()].long()
        inside += int(torch.isin(answer, support).sum())
        total += len(answer)
    return inside / max(total, 1)
