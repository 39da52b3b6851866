"""What a run leaves behind as JSON: the only source the report may draw from.

Measuring and telling are two things. The bench and the trainer write numbers; the report reads
them and adds nothing, so every figure on the page can be traced to a key in a file, and the page
can be made again years later on a machine without a model. The schemas are frozen and refuse
unknown keys: a misspelt counter fails when it is written, not when somebody wonders about an empty
column.

Four files:

- ``summary.json`` (:class:`Summary`): the headline, one row per prompt group and temperature;
- ``bench.json`` (:class:`Bench`): one arm per category and temperature, with counters, per-slot
  acceptance, every prompt and every repeat of the speed measurement;
- ``training.json`` (:class:`dspark.bench.curves.Training`): the curves;
- ``lineage.json`` (:class:`Lineage`): which artifact was made from which.

Definitions follow docs/contract.md: acceptance length is ``1 + accepted / steps``, null where no
step was taken because every answer ended with its first token; its interval is over prompts, null
for fewer than two with steps; per-slot
acceptance is UNCONDITIONAL (accepted at slot k / all steps), therefore never rising along the
block; training's ``accept_rate`` is the mean overlap of slot k given a right prefix, therefore
conditional.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dspark.artifacts import Made
from dspark.config.architecture import Frozen
from dspark.config.prompts import Category
from dspark.config.recipe import PositiveFloat
from dspark.errors import DamagedArtifactError, ForeignArtifactError, MissingArtifactError

PromptGroup = Literal["workload", "general"]
PieceKind = Literal["prompt", "accepted", "bonus", "corrected"]
Probability = Annotated[float, Field(ge=0, le=1 + 1e-6)]  # a float32 mean of ones may exceed 1
AcceptanceLength = Annotated[float, Field(ge=1)]


def _whole(value: int | float) -> int | float:
    """0.0 and 1.0 are written as 0 and 1, so that files made by different hands compare equal."""
    return int(value) if value == int(value) else value


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"an interval runs from low to high, found {list(pair)}")
    return pair


def _part_of(pair: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= pair[0] <= pair[1] or pair[1] == 0:
        raise ValueError(f"[n, m] needs 0 <= n <= m and m > 0, found {list(pair)}")
    return pair


SamplingTemperature = Annotated[int | float, Field(ge=0, le=5), AfterValidator(_whole)]
Interval = Annotated[tuple[float, float], AfterValidator(_ordered)]
PartOf = Annotated[tuple[int, int], AfterValidator(_part_of)]


class Speed(Frozen):
    """Tokens per second of both arms: median over repeats."""

    plain: PositiveFloat
    draft: PositiveFloat


class SummaryResult(Frozen):
    """One headline row. ``speedup`` is draft / plain; ``identical_to_plain`` is null at T > 0."""

    prompts: PromptGroup
    temperature: SamplingTemperature
    acceptance_length: AcceptanceLength | None
    ci95: Interval | None
    tokens_per_second: Speed
    speedup: PositiveFloat
    identical_to_plain: PartOf | None

    @model_validator(mode="after")
    def _identity_is_greedy_only(self) -> SummaryResult:
        if self.temperature > 0 and self.identical_to_plain is not None:
            raise ValueError("identical_to_plain is meaningful at temperature 0 only: write null")
        return self


class Summary(Frozen):
    """``summary.json``. Only ``seconds_total`` and ``results`` are required.

    ``stages`` says how each stage was made; ``command``, ``commit``, ``machine`` and ``versions``
    are those of the bench, which measured the figures.
    """

    seconds_total: NonNegativeFloat
    results: tuple[SummaryResult, ...] = Field(min_length=1)
    name: str | None = None
    target: str | None = None
    workload_description: str | None = None
    stage_seconds: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    stages: dict[str, Made] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    command: str | None = None
    commit: str | None = None
    machine: str | dict[str, str | int | float] | None = None
    verification: str | None = None
    draft_sample_method: str | None = None
    dtype: str | None = None
    block_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_row_each(self) -> Summary:
        rows = [(r.prompts, r.temperature) for r in self.results]
        if len(set(rows)) != len(rows):
            raise ValueError(f"results holds a (prompts, temperature) pair twice: {rows}")
        return self


class PromptResult(Frozen):
    """One prompt decoded with the draft."""

    id: str
    acceptance_length: AcceptanceLength | None
    steps: NonNegativeInt
    tokens: NonNegativeInt


class ArmSpeed(Speed):
    """Medians, and every repeat they were taken from, in the order of measurement."""

    plain_repeats: tuple[PositiveFloat, ...] = ()
    draft_repeats: tuple[PositiveFloat, ...] = ()


class Piece(Frozen):
    """Text of one generated token (or of a stretch of prompt) and how it came about."""

    text: str
    kind: PieceKind


class Sample(Frozen):
    """One real answer, in order: ``accepted`` tokens, each run closed by a bonus or a corrected."""

    prompt: str
    pieces: tuple[Piece, ...] = Field(min_length=1)


class BenchArm(Frozen):
    """One (category, temperature). Counters are totals over its prompts.

    ``per_slot_acceptance`` is zero in every slot where ``steps`` is 0.
    """

    category: Category
    group: PromptGroup | None = None
    temperature: SamplingTemperature
    prompt_count: PositiveInt
    acceptance_length: AcceptanceLength | None
    ci95: Interval | None
    per_slot_acceptance: tuple[Probability, ...] = Field(min_length=1)
    drafted: NonNegativeInt
    admitted: NonNegativeInt
    accepted: NonNegativeInt
    steps: NonNegativeInt
    tokens: PositiveInt
    prompts: tuple[PromptResult, ...]
    tokens_per_second: ArmSpeed | None = None
    identical: PartOf | None = None
    sample: Sample | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> BenchArm:
        if len(self.prompts) != self.prompt_count:
            raise ValueError(
                f"prompt_count is {self.prompt_count} but prompts holds {len(self.prompts)}"
            )
        if not self.accepted <= self.admitted <= self.drafted:
            raise ValueError(
                "counters need accepted <= admitted <= drafted, found "
                f"{self.accepted}, {self.admitted}, {self.drafted}"
            )
        self._length_follows()
        slots = self.per_slot_acceptance
        if any(b > a + 1e-9 for a, b in itertools.pairwise(slots)):
            raise ValueError(
                f"per_slot_acceptance must never rise (it is unconditional), found {list(slots)}"
            )
        if self.temperature > 0 and self.identical is not None:
            raise ValueError("identical is meaningful at temperature 0 only: write null")
        return self

    def _length_follows(self) -> None:
        if (self.acceptance_length is None) != (self.steps == 0):
            raise ValueError(
                "acceptance_length is null exactly when steps is 0, found "
                f"{self.acceptance_length} and {self.steps}"
            )
        if self.acceptance_length is not None:
            implied = 1 + self.accepted / self.steps
            if not math.isclose(self.acceptance_length, implied, abs_tol=0.01):
                raise ValueError(
                    f"acceptance_length {self.acceptance_length} is not 1 + accepted/steps = "
                    f"{implied:.4f}"
                )


class Bench(Frozen):
    """``bench.json``."""

    arms: tuple[BenchArm, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_shape(self) -> Bench:
        pairs = [(a.category, a.temperature) for a in self.arms]
        if len(set(pairs)) != len(pairs):
            raise ValueError(f"arms holds a (category, temperature) pair twice: {pairs}")
        sizes = {len(a.per_slot_acceptance) for a in self.arms}
        if len(sizes) != 1:
            raise ValueError(f"arms have different block sizes: {sorted(sizes)}")
        return self

    @property
    def block_size(self) -> int:
        """Slots drafted per step."""
        return len(self.arms[0].per_slot_acceptance)


class LineageEntry(Frozen):
    """One artifact; ``parents`` maps the artifacts it was made from to their fingerprints."""

    artifact: str = Field(min_length=1)
    kind: str = ""
    fingerprint: str = Field(min_length=1)
    parents: dict[str, str] = Field(default_factory=dict)


class Lineage(Frozen):
    """``lineage.json``, oldest artifact first."""

    artifacts: tuple[LineageEntry, ...] = ()


Schema = TypeVar("Schema", bound=Frozen)


def read_results(path: Path, schema: type[Schema]) -> Schema:
    """Read one results file.

    Raises:
        MissingArtifactError: no such file.
        DamagedArtifactError: not readable, not UTF-8 or not JSON.
        ForeignArtifactError: JSON of another shape, or values that contradict each other.
    """
    expected = f"a {schema.__name__} document"
    fix = "Run the stage that writes it again; do not edit results by hand."
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError:
        raise MissingArtifactError(
            expected=expected, found="no file", where=str(path), fix=fix
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedArtifactError(
            expected=expected, found=f"{type(error).__name__}: {error}", where=str(path), fix=fix
        ) from error
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ForeignArtifactError(
            expected=expected,
            found=f"{first['msg']} ({error.error_count()} problems)",
            where=f"{path} at {place or 'top level'}",
            fix=fix,
        ) from error
