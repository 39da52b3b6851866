"""A comparison as JSON; how its numbers are made is in :mod:`dspark.bench.figures.pairs`."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from dspark.bench.figures.schema import Interval
from dspark.config.architecture import Frozen

MOST_DIVERGENCES = 20


class Divergence(Frozen):
    """First place where two answers differ: ``token`` (0-based), or ``character`` where the engine
    sent no ids; None where only hashes are known."""

    question: str
    turn: NonNegativeInt
    token: NonNegativeInt | None = None
    character: NonNegativeInt | None = None


class Identity(Frozen):
    """How many answers of ``of`` at temperature 0 are equal, and where others are not (the first
    ``MOST_DIVERGENCES``)."""

    first: str
    second: str
    same: NonNegativeInt
    of: NonNegativeInt
    divergences: tuple[Divergence, ...] = ()


class PairFigures(Frozen):
    """One benchmark at one temperature. ``ratio`` is a / b of pooled lengths.

    ``difference`` is b - a. ``wins_b`` prompts where b's own length is larger, ``ties`` equal ones.
    ``mean_prompt_ratio`` the mean over prompts of a / b, ``speed_ratio`` a / b in tokens a second.
    """

    task: str
    title: str
    temperature: float
    prompts: NonNegativeInt
    unpaired: NonNegativeInt
    a: float | None
    b: float | None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    mean_prompt_ratio: float | None = None
    wins_a: NonNegativeInt = 0
    wins_b: NonNegativeInt = 0
    ties: NonNegativeInt = 0
    speed_ratio: float | None = None
    identity: tuple[Identity, ...] = ()


class Overall(Frozen):
    """All benchmarks at one temperature; the interval is over prompts within benchmarks."""

    temperature: float
    benchmarks: NonNegativeInt
    ratio_of_means: float
    mean_of_ratios: float
    ratio_of_means_interval: Interval | None = None
    verdict: str


class Comparison(Frozen):
    """``dspark compare A B``."""

    schema_version: str = Field(default="dspark-compare/1", alias="schema")
    a: str
    b: str
    pairs: tuple[PairFigures, ...]
    overall: tuple[Overall, ...]
    stack_differences: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
