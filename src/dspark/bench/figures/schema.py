"""The results of a suite as JSON: the only source of tables, plots, pages and comparisons.

Definitions (docs/contract.md, sections 1, 6 and 10):

- ``length``: acceptance length 1 + accepted / steps, pooled over all steps; >= 1.
- ``length_per_prompt``: the mean over prompts of their own lengths: what a user of one prompt sees.
- ``rate_drafted`` / ``rate_admitted``: accepted / drafted and accepted / admitted.
- ``tokens_per_forward``: tokens that came out per target forward behind the prompt, drafted or not
  (ATOM's tok/fwd counts the same, before what lies behind the end is cut off).
- ``unconditional[k]``: steps that accepted slot k / all steps; never rises along the block.
- ``conditional[k]``: of the steps that accepted slot k - 1 and verified slot k, those that
  accepted it.

Intervals are 95 % bootstrap intervals over prompts, all turns of a prompt together.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from dspark.bench.play.settings import SuiteSettings
from dspark.bench.play.turn import Where
from dspark.config.architecture import Frozen

SCHEMA = "dspark-suite/1"
Length = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]
Interval = tuple[float, float]


class Acceptance(Frozen):
    """Acceptance over some answers. Null where the source does not tell, or nothing was drafted."""

    prompts: NonNegativeInt
    steps: NonNegativeInt
    drafted: NonNegativeInt
    admitted: NonNegativeInt | None
    accepted: NonNegativeInt
    length: Length | None
    interval: Interval | None = None
    length_per_prompt: Length | None = None
    interval_per_prompt: Interval | None = None
    rate_drafted: Share | None = None
    rate_admitted: Share | None = None
    tokens_per_forward: NonNegativeFloat | None = None
    unconditional: tuple[Share, ...] | None = None
    conditional: tuple[Share | None, ...] | None = None


class Spread(Frozen):
    """Of a time in seconds over answers."""

    mean: NonNegativeFloat
    p50: NonNegativeFloat
    p90: NonNegativeFloat
    p99: NonNegativeFloat


class SpeedFigures(Frozen):
    """``tokens_per_second`` over the wall time of the arm, at the concurrency of the settings;
    ``per_request`` the mean of single answers. ``first`` TTFT, ``each`` TPOT behind the first."""

    seconds: NonNegativeFloat
    tokens_per_second: NonNegativeFloat | None
    per_request: NonNegativeFloat | None
    first: Spread | None
    each: Spread | None


class Quality(Frozen):
    """Graded answers: ``right`` of ``graded`` (the others had nothing to be compared with).

    ``cut`` of them ended at the limit of tokens, ``unreadable`` hold no answer: neither is right.
    """

    grader: str
    graded: NonNegativeInt
    right: NonNegativeInt
    unreadable: NonNegativeInt
    cut: NonNegativeInt


class PromptRow(Frozen):
    """One question: its turns together. ``digests`` are of its answers, turn by turn."""

    id: str
    key: str
    category: str
    turns: NonNegativeInt
    tokens: NonNegativeInt
    prompt_tokens: NonNegativeInt | None
    truncated: NonNegativeInt
    steps: NonNegativeInt | None
    drafted: NonNegativeInt | None
    accepted: NonNegativeInt | None
    digests: tuple[str, ...]
    right: bool | None = None
    error: str | None = None


class ArmFigures(Frozen):
    """One task at one temperature.

    ``asked`` questions; ``failed`` turns without an answer, of which ``timed_out``; ``truncated``
    turns cut at the limit. ``source``: where acceptance is from. ``notices``: what a reader must
    know.
    """

    task: str
    title: str
    task_hash: str
    rows_from: str
    temperature: NonNegativeFloat
    top_p: float
    max_tokens: PositiveInt
    asked: NonNegativeInt
    available: NonNegativeInt
    turns: NonNegativeInt
    failed: NonNegativeInt
    timed_out: NonNegativeInt
    truncated: NonNegativeInt
    tokens: NonNegativeInt
    prompt_tokens: NonNegativeInt
    source: Where
    acceptance: Acceptance | None
    speed: SpeedFigures | None
    quality: Quality | None = None
    by_category: dict[str, Acceptance] = Field(default_factory=dict)
    by_turn: dict[str, Acceptance] = Field(default_factory=dict)
    by_context: dict[str, Acceptance] = Field(default_factory=dict)
    by_position: dict[str, Acceptance] = Field(default_factory=dict)
    notices: tuple[str, ...] = ()
    prompts: tuple[PromptRow, ...] = ()


class SuiteResults(Frozen):
    """One suite on one stack. ``stack`` is what may not differ in a fair comparison, ``draft`` what
    is compared; ``missing`` are tasks that could not be asked, with the reason."""

    schema_version: str = Field(default=SCHEMA, alias="schema", pattern=r"^dspark-suite/1$")
    suite: str
    name: str
    settings: SuiteSettings
    stack: dict[str, Any]
    draft: dict[str, Any]
    made: dict[str, Any]
    arms: tuple[ArmFigures, ...]
    missing: dict[str, str] = Field(default_factory=dict)
    answers: str | None = None
    answers_sha256: str | None = None
    notices: tuple[str, ...] = ()
