"""The training loop: small on purpose, because every decision it takes lives in its own module.

Numerics: fp32 master weights, bf16 products under autocast, fp32 loss. The denominator of the loss
is the sum of slot weights of the whole accumulation window, so accumulating N micro-batches equals
one batch N times as large. How ``max_seconds`` ends a run is in ``dspark.training.pace``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.config.recipe import TrainSection
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.training.anchors import Blocks, build_blocks, sample_anchors
from dspark.training.batches import (
    BatchPlan,
    require_anchors,
    require_normed,
    split_validation,
)
from dspark.training.checkpoint import TrainingState, load_state, save_state
from dspark.training.evaluate import Evaluator
from dspark.training.loss import slot_weights
from dspark.training.optim import build_optimizer, coefficients, learning_rate
from dspark.training.pace import Pace
from dspark.training.step import StepOutput, Vocabulary, training_step, window_weight

OnStep = Callable[[int, int, dict[str, Any]], None]


class Trainer:
    """Trains ``draft`` in place on hidden records. ``head`` is the target's lm_head [V, H].

    ``clock`` gives seconds; only differences count, and without ``max_seconds`` only in records.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        head: Tensor,
        records: Sequence[HiddenRecord],
        section: TrainSection,
        folder: Path,
        support: Tensor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_anchors(records)
        require_normed(records)
        self.draft, self.section, self.folder, self.clock = draft, section, folder, clock
        self.training, self.validation = split_validation(records)
        self.vocabulary = Vocabulary.of(head, support, torch.float32)
        self.block_size = draft.config.block_size
        self.plan = BatchPlan(
            self.training,
            batch_size=section.batch_size,
            num_anchors=section.num_anchors,
            block_size=self.block_size,
            seed=section.seed,
        )
        self.optimizer = build_optimizer(draft, section)
        self.full = max(1, math.ceil(section.epochs * self.plan.per_epoch / section.accumulate))
        self.state = TrainingState(0, self.full, 0.0, 0.0, {"steps": [], "evals": []})
        self.device = head.device

    def run(self, on_step: OnStep = lambda *_: None) -> dict[str, list[dict[str, Any]]]:
        """Train to the end (resuming if a state is there); return the history.

        Raises:
            TrainingError: the loss became non-finite.
        """
        self.state = load_state(self.folder, self.draft, self.optimizer) or self.state
        state = self.state
        pace = Pace(self.section, self.full, state)
        used, started = state.seconds, self.clock()
        while state.step < state.total:
            begun = self.clock()
            row = self._step(state.step, pace.position(state), state.total)
            ended = self.clock()
            state.seconds = used + ended - started
            pace.advance(state, ended - begun)
            state.history["steps"].append({"step": state.step, "seconds": state.seconds, **row})
            last = state.step == state.total
            if last or state.step % self.section.eval_every == 0:
                evaluation = self.evaluate()
                state.history["evals"].append(
                    {"step": state.step, "seconds": state.seconds, **evaluation}
                )
            if last or state.step % self.section.checkpoint_every == 0:
                save_state(self.folder, self.draft, self.optimizer, state)
            on_step(state.step, state.total, state.history["steps"][-1])
            pace.pause(self.clock() - ended)
        return state.history

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.section.precision == "bfloat16"
        )

    def forward(
        self,
        blocks: Blocks,
        coefs: tuple[float, float, float],
        denominator: float,
    ) -> StepOutput:
        """One micro-batch through the training layout."""
        loss = self.section.loss
        with self._autocast():
            return training_step(
                self.draft,
                blocks.to(self.device),
                self.vocabulary,
                coefficients=coefs,
                decay=loss.decay,
                denominator=denominator,
                chunk=loss.chunk_rows,
                detach_confidence=loss.detach_confidence,
            )

    def _step(self, step: int, position: float, total: int) -> dict[str, Any]:
        """Optimiser step ``step`` (``accumulate`` micro-batches) at ``position`` of the plan."""
        section = self.section
        rate = learning_rate(section, position, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        coefs = coefficients(section.loss, position, total)
        first = step * section.accumulate
        window = [self.plan.batch(first + i) for i in range(section.accumulate)]
        denominator = max(window_weight(window, section.loss.decay), 1e-8)
        sums = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "outside": 0.0}
        for blocks in window:
            out = self.forward(blocks, coefs, denominator)
            torch.stack(list(out.terms.values())).sum().backward()
            for name, value in self._weighted(out, denominator, coefs).items():
                sums[name] += value
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                [p for p in self.draft.parameters() if p.requires_grad], section.max_grad_norm
            )
        )
        loss = coefs[0] * sums["ce"] + coefs[1] * sums["l1"] + coefs[2] * sums["confidence"]
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                expected="a finite loss and gradient",
                found=f"loss {loss}, gradient norm {norm}",
                where=f"training step {step + 1}",
                fix="Lower train.learning_rate; the last checkpoint is intact.",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(int(b.slot_mask.sum()) for b in window)
        # A label that the draft cannot propose has no cross entropy: the mean is over the others.
        inside = 1 - sums["outside"]
        sums["ce"] = sums["ce"] / inside if inside > 1e-6 else 0.0
        return {**sums, "loss": loss, "learning_rate": rate, "grad_norm": norm, "tokens": tokens}

    def _weighted(
        self, out: StepOutput, denominator: float, coefs: tuple[float, float, float]
    ) -> dict[str, float]:
        """Unweighted loss terms of one micro-batch, in the window's normalisation, and the weighted
        share of labels outside the draft vocabulary, which the loss counts as no cross entropy."""
        decay = self.section.loss.decay
        per_slot = slot_weights(self.block_size, decay).to(out.slots.device)
        weight = per_slot[out.slots] / denominator
        confidence = float(out.terms["confidence"].detach()) / coefs[2] if coefs[2] else 0.0
        return {
            "ce": float((out.stats.ce * weight).sum()),
            "l1": float((out.stats.l1 * weight).sum()),
            "confidence": confidence,
            "outside": float(((1 - out.stats.inside) * weight).sum()),
        }

    def _validation_batches(self) -> list[tuple[Blocks, list[str]]]:
        size = self.section.batch_size
        generator = torch.Generator().manual_seed(self.section.seed)
        batches = []
        for start in range(0, len(self.validation), size):
            records = self.validation[start : start + size]
            anchors = [
                sample_anchors(r.loss_mask, self.section.num_anchors, generator) for r in records
            ]
            blocks = build_blocks(records, anchors, self.block_size)
            if bool(blocks.slot_mask.any()):
                batches.append((blocks, [r.category for r in records]))
        return batches

    def evaluate(self) -> dict[str, Any]:
        """Teacher-forced metrics on the validation records, and the gradient-norm shares."""
        loss = self.section.loss
        coefs = (loss.ce, loss.l1, loss.confidence)
        evaluator = Evaluator(self.block_size)
        batches = self._validation_batches()
        with torch.no_grad():
            for blocks, categories in batches:
                evaluator.add(blocks, self.forward(blocks, coefs, 1.0), categories)
        return {**evaluator.summary(), "grad_share": self._gradient_share(batches[0][0], coefs)}

    def _gradient_share(
        self, blocks: Blocks, coefs: tuple[float, float, float]
    ) -> dict[str, float]:
        """Norm of each weighted term's gradient on one batch, as shares of their sum."""
        denominator = window_weight([blocks], self.section.loss.decay)
        parameters = [p for p in self.draft.parameters() if p.requires_grad]
        norms = {}
        for i, name in enumerate(("ce", "l1", "confidence")):
            single = tuple(c if i == j else 0.0 for j, c in enumerate(coefs))
            out = self.forward(blocks, (single[0], single[1], single[2]), denominator)
            term = out.terms["confidence" if name == "confidence" else "draft"]
            grads = torch.autograd.grad(term, parameters, allow_unused=True)
            norms[name] = math.sqrt(
                sum(float(g.float().square().sum()) for g in grads if g is not None)
            )
        total = sum(norms.values()) or 1.0
        return {name: value / total for name, value in norms.items()}
