"""``training.json``: the curves of a training run (see :mod:`dspark.bench.results`)."""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from dspark.bench.results import AcceptanceLength, Probability
from dspark.config.architecture import Frozen
from dspark.config.prompts import Category


class GradShare(Frozen):
    """Share of the gradient norm that each weighted loss term brings."""

    ce: Probability
    l1: Probability
    confidence: Probability


class TrainingStep(Frozen):
    """One optimizer step. Loss terms are unweighted; ``loss`` is their weighted sum.

    ``ce`` is the mean over labels that the draft vocabulary holds, ``outside`` the share of the
    others, whose cross entropy ``loss`` counts as zero: loss = c * ce * (1 - outside) + ...
    """

    step: NonNegativeInt
    seconds: NonNegativeFloat
    ce: NonNegativeFloat
    l1: Annotated[float, Field(ge=0, le=2.0001)]
    confidence: NonNegativeFloat
    loss: NonNegativeFloat
    learning_rate: NonNegativeFloat
    grad_norm: NonNegativeFloat
    tokens: NonNegativeInt
    grad_share: GradShare | None = None
    outside: Probability | None = None


class Evaluation(Frozen):
    """Teacher-forced measurement on held-out answers after ``step`` optimizer steps."""

    step: NonNegativeInt
    seconds: NonNegativeFloat
    ce: NonNegativeFloat
    l1: Annotated[float, Field(ge=0, le=2.0001)]
    confidence: NonNegativeFloat
    accept_rate: tuple[Probability, ...] = Field(min_length=1)
    greedy_agreement: tuple[Probability, ...] = Field(min_length=1)
    tau_all: AcceptanceLength
    tau_full: AcceptanceLength
    by_category: dict[Category, AcceptanceLength] = Field(default_factory=dict)
    by_context: dict[str, AcceptanceLength] = Field(default_factory=dict)
    confidence_bias: float
    confidence_abs_error: NonNegativeFloat
    grad_share: GradShare | None = None
    outside: Probability | None = None

    @model_validator(mode="after")
    def _same_slots(self) -> Evaluation:
        if len(self.accept_rate) != len(self.greedy_agreement):
            raise ValueError(
                f"accept_rate has {len(self.accept_rate)} slots, greedy_agreement "
                f"{len(self.greedy_agreement)}"
            )
        return self


class Decoded(Frozen):
    """Real greedy decoding of a few held-out prompts after ``step`` optimizer steps."""

    step: NonNegativeInt
    acceptance_length: AcceptanceLength


class Training(Frozen):
    """``training.json``, in step order."""

    steps: tuple[TrainingStep, ...] = Field(min_length=1)
    evals: tuple[Evaluation, ...] = ()
    decoded: tuple[Decoded, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> Training:
        for name, numbers in (
            ("steps", [s.step for s in self.steps]),
            ("evals", [e.step for e in self.evals]),
        ):
            if any(b <= a for a, b in itertools.pairwise(numbers)):
                raise ValueError(f"{name} must be in rising step order, each step once")
        return self
