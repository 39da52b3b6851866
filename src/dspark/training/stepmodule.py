"""The whole of one micro-batch as a module: what is sharded, compiled and called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config.recipe import TrainSection
from dspark.model.draft import DSparkDraft
from dspark.training.anchors import Blocks
from dspark.training.loss import RowStats
from dspark.training.step import StepOutput, Vocabulary, training_step


class StepModule(nn.Module):
    """Holds ``draft`` and runs :func:`dspark.training.step.training_step`.

    A module because sharding gathers weights around a module's call. It gives plain tensors, which
    is where sharding looks for what will be differentiated.
    """

    def __init__(self, draft: DSparkDraft, vocabulary: Vocabulary, section: TrainSection) -> None:
        super().__init__()
        self.draft, self.vocabulary, self.section = draft, vocabulary, section
        self.autocasts = section.precision == "bfloat16"

    def forward(
        self, blocks: Blocks, coefficients: tuple[float, float, float], denominator: float
    ) -> tuple[Tensor, ...]:
        loss = self.section.loss
        device = blocks.ids.device.type
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocasts:
            context = torch.autocast(device, torch.bfloat16)
        with context:
            out = training_step(
                self.draft,
                blocks,
                self.vocabulary,
                coefficients=coefficients,
                decay=loss.decay,
                denominator=denominator,
                chunk=loss.chunk_rows,
                detach_confidence=loss.detach_confidence,
                save_memory=self.section.checkpoint_activations,
            )
        stats = out.stats
        return (
            out.terms["draft"],
            out.terms["confidence"],
            stats.ce,
            stats.l1,
            stats.agree,
            stats.inside,
            out.confidence,
            out.slots,
        )

    def run(
        self, blocks: Blocks, coefficients: tuple[float, float, float], denominator: float
    ) -> StepOutput:
        """The same with names."""
        draft, confidence, *stats, probability, slots = self(blocks, coefficients, denominator)
        terms = {"draft": draft, "confidence": confidence}
        return StepOutput(terms, RowStats(*stats), probability, slots)
