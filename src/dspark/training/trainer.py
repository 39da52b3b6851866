"""The training loop: small on purpose, because every decision it takes lives in its own module.

Numerics: fp32 master weights, bf16 products under autocast, fp32 loss. The denominator of the loss
is the sum of slot weights of the whole accumulation window over all ranks, so accumulating N
micro-batches equals one batch N times as large, on however many ranks. How ``max_seconds`` ends a
run is in ``dspark.training.pace``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.config.recipe import TrainSection
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.training.batches import (
    BatchPlan,
    MicroBatch,
    Plan,
    require_anchors,
    require_normed,
    split_validation,
)
from dspark.training.checkpoint import (
    TrainingState,
    load_best,
    load_shards,
    load_state,
    save_best,
    save_shards,
    save_state,
    trained_weights,
)
from dspark.training.evaluate import Held, evaluate_held
from dspark.training.interrupt import Interrupts
from dspark.training.loss import slot_weights
from dspark.training.optim import Average, build_optimizer, coefficients, learning_rate
from dspark.training.pace import Pace
from dspark.training.parallel import Solo, require_even, whole_weights
from dspark.training.step import StepOutput, Vocabulary, weight_of
from dspark.training.stepmodule import StepModule
from dspark.training.watch import LEDGER, MetricLog, StepLines, Watchdog

OnStep = Callable[[int, int, dict[str, Any]], None]
Decode = Callable[[DSparkDraft], float]
"""Real decoding of a few held-out prompts with a draft, which it may spoil: acceptance length."""


def due(step: int, every: int) -> bool:
    """Whether something done ``every`` so many steps (0: never) comes behind ``step``."""
    return every > 0 and step % every == 0


class Trainer:
    """Trains ``draft`` in place on hidden records. ``head`` is the target's lm_head [V, H].

    With ``plan``, micro-batches come from there (a stream) and ``records`` are only judged on;
    otherwise they are split. ``clock`` gives seconds; only differences count, and without
    ``max_seconds`` only in records.
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
        *,
        plan: Plan | None = None,
        group: Solo | None = None,
        decode: Decode | None = None,
    ) -> None:
        require_anchors(records)
        require_normed(records)
        self.draft, self.section, self.folder, self.clock = draft, section, folder, clock
        self.group, self.decode = group or Solo(), decode
        self.block_size, self.device = draft.config.block_size, head.device
        require_even(section.accumulate, self.group)
        self.vocabulary = Vocabulary.of(head, support, torch.float32)
        self.training: list[HiddenRecord] = []
        self.validation = list(records)
        if plan is None:
            self.training, self.validation = split_validation(records)
            plan = BatchPlan(
                self.training,
                batch_size=section.batch_size,
                num_anchors=section.num_anchors,
                block_size=self.block_size,
                seed=section.seed,
                by_length=section.order == "length",
                packed=section.packed,
                batch_tokens=section.batch_tokens,
            )
        self.plan = plan
        self.module = self._module()
        self.optimizer = build_optimizer(draft, section)
        self.average = None if section.ema is None else Average(draft, section.ema)
        self.full = max(1, math.ceil(section.epochs * plan.per_epoch / section.accumulate))
        self.state = TrainingState(0, self.full, 0.0, 0.0, {"steps": [], "evals": []})
        self._streams = section.mode != "offline"
        self.ledger = StepLines(folder / f"rank-{self.group.rank}.{LEDGER}")
        self.log = MetricLog(section.log if self.group.rank == 0 else (), folder)
        self.watch: Watchdog | None = None
        self.interrupts = Interrupts(at_once=not self.group.sharded)

    def _module(self) -> StepModule:
        module = StepModule(self.draft, self.vocabulary, self.section)
        half = torch.bfloat16 if self.section.precision == "bfloat16" else None
        self.group.shard(module, self.draft, half)
        if self.section.compile:
            for layer in self.draft.draft_layers:
                layer.mlp.compile()
        return module

    def run(self, on_step: OnStep = lambda *_: None) -> dict[str, list[dict[str, Any]]]:
        """Train to the end (resuming if a state is there); return the history.

        Raises:
            TrainingError: the loss became non-finite.
            StreamError: a stage of the stream stands still.
        """
        load = load_shards if self.group.sharded else load_state
        self.state = load(self.folder, self.draft, self.optimizer, self.average) or self.state
        state, section = self.state, self.section
        self.ledger.resume(state.step)
        self.log.resume(state.step)
        self.plan.begin(state.step * section.accumulate, state.total * section.accumulate)
        pace = Pace(section, self.full, state)
        used, started = state.seconds, self.clock()
        if self._streams or self.group.sharded:
            self.watch = Watchdog(section.stream.stall_seconds)
        try:
            with self.interrupts:
                while state.step < state.total:
                    self._advance(pace, used, started, on_step)
        except (KeyboardInterrupt, SystemExit):
            # Weights are those of `state.step`: what the cut step computed is gone.
            self._save()
            raise
        finally:
            if self.watch is not None:
                self.watch.end()
        return state.history

    def _advance(self, pace: Pace, used: float, started: float, on_step: OnStep) -> None:
        """One optimiser step with what is due behind it."""
        state, interrupts = self.state, self.interrupts
        begun = self.clock()
        row, update = self._step(state.step, pace.position(state), state.total)
        with interrupts.hold():
            update()
            ended = self.clock()
            state.seconds = used + ended - started
            pace.advance(state, ended - begun)
            state.history["steps"].append({"step": state.step, "seconds": state.seconds, **row})
        with self._unwatched():
            self._behind(state, state.step == state.total)
        on_step(state.step, state.total, {**state.history["steps"][-1], **self.plan.status()})
        pace.pause(self.clock() - ended)
        if self.group.sharded and self.group.any(interrupts.caught is not None):
            interrupts.end()

    def _unwatched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.waiting()

    def _behind(self, state: TrainingState, last: bool) -> None:
        """Evaluation, decoding, log and checkpoint, where they are due."""
        section = self.section
        if last or due(state.step, section.eval_every):
            evaluation = self.evaluate()
            state.history["evals"].append(
                {"step": state.step, "seconds": state.seconds, **evaluation}
            )
        if self.decode is not None and (last or due(state.step, section.decode_every)):
            self._decode(self.decode, state)
        self.log.write({**state.history["steps"][-1], **self.plan.status()})
        if last or due(state.step, section.checkpoint_every):
            with self.interrupts.hold():
                self._save()

    def _swap(self) -> None:
        """Exchange weights and average, as a whole."""
        if self.average is not None:
            with self.interrupts.hold():
                self.average.swap()

    def _save(self) -> None:
        if self.group.sharded:
            save_shards(
                self.folder, self.draft, self.optimizer, self.state, self.group, self.average
            )
        else:
            save_state(self.folder, self.draft, self.optimizer, self.state, self.average)

    def _window(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of optimiser step ``step``."""
        first, size = step * self.section.accumulate, self.group.size
        numbers = range(first, first + self.section.accumulate)
        mine = [n for n in numbers if n % size == self.group.rank]
        with self._unwatched():
            return [self.plan.micro_batch(n) for n in mine]

    def _step(
        self, step: int, position: float, total: int
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Gradients of optimiser step ``step`` at ``position`` of the plan: its row for the
        history, and what takes the step."""
        section, group = self.section, self.group
        rate = learning_rate(section, position, total)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        coefs = coefficients(section.loss, position, total)
        window = self._window(step)
        # A cut step may have left gradients.
        self.optimizer.zero_grad(set_to_none=True)
        counts = [micro.slot_counts() for micro in window]
        weights = sum(weight_of(c, section.loss.decay) for c in counts)
        denominator = max(group.sums([weights])[0], 1e-8)
        sums = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "outside": 0.0}
        for i, micro in enumerate(window):
            group.last_micro_batch(self.module, i == len(window) - 1)
            out = self.module.run(micro.blocks().to(self.device), coefs, denominator)
            torch.stack(list(out.terms.values())).sum().backward()
            for name, value in self._weighted(out, denominator, coefs).items():
                sums[name] += value
            if self.watch is not None:
                self.watch.beat()
        tokens = float(sum(int(c.sum()) for c in counts))
        *values, tokens = group.sums([*sums.values(), tokens])
        sums = dict(zip(sums, values, strict=True))
        norm = self._clip()
        loss = coefs[0] * sums["ce"] + coefs[1] * sums["l1"] + coefs[2] * sums["confidence"]
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                expected="a finite loss and gradient",
                found=f"loss {loss}, gradient norm {norm}",
                where=f"training step {step + 1}",
                fix="Lower train.learning_rate; the last checkpoint is intact.",
            )
        # A label that the draft cannot propose has no cross entropy: the mean is over the others.
        inside = 1 - sums["outside"]
        sums["ce"] = sums["ce"] / inside if inside > 1e-6 else 0.0
        row = {**sums, "loss": loss, "learning_rate": rate, "grad_norm": norm}
        return row | {"tokens": int(tokens)}, lambda: self._update(window)

    def _decode(self, decode: Decode, state: TrainingState) -> None:
        """Decode for real; keep the weights if they are the best so far."""
        draft = self._whole()
        kept = {n: p.detach().cpu().clone() for n, p in trained_weights(draft).items()}
        found = decode(draft) if self.group.rank == 0 else 0.0
        found = self.group.sums([found])[0]
        rows = state.history.setdefault("decoded", [])
        best = max((row["acceptance_length"] for row in rows), default=0.0)
        rows.append({"step": state.step, "acceptance_length": found})
        if rows[-1]["acceptance_length"] > best and self.group.rank == 0:
            save_best(self.folder, kept, state.step)

    def _whole(self) -> DSparkDraft:
        """A copy of the draft with whole weights, on every rank: the average's if there is one."""
        self._swap()
        draft = DSparkDraft(self.draft.config)
        draft.load_state_dict(whole_weights(self.draft))
        self._swap()
        return draft.to(self.device)

    def finished(self) -> DSparkDraft:
        """The trained draft, whole, on every rank: what decoded best, else the average, else the
        last weights."""
        if self.decode is not None:
            self.group.wait()  # for rank 0's file
            rows = self.state.history["decoded"]
            best = max(rows, key=lambda row: float(row["acceptance_length"]))
            draft = self._whole()
            load_best(self.folder, draft, best["step"])
            return draft
        if self.average is None and not self.group.sharded:
            return self.draft
        return self._whole()

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.draft.parameters() if p.requires_grad], self.section.max_grad_norm
        )
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _update(self, window: list[MicroBatch]) -> None:
        """Take the step; only now are its rows no longer needed."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        if self._streams:
            ids = [micro.ids for micro in window]
            self.ledger.write({"step": self.state.step + 1, "rows": ids})
        for micro in window:
            self.plan.release(micro.number)

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

    def evaluate(self) -> dict[str, Any]:
        """Teacher-forced metrics on held-back rows, of the average if there is one."""
        held = Held(self.validation, self.section, self.block_size, self.device)
        self._swap()
        try:
            return evaluate_held(self.module, held, self.group)
        finally:
            self._swap()
