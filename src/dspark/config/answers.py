"""A recipe's ``regenerate`` section: who answers the prompts, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from dspark.config.architecture import Frozen

LEAST_TEMPERATURE = 0.01


def _greedy_or_warm(value: float) -> float:
    """Below it a draw is greedy in all but name: 0 was meant, or it is a slip."""
    if 0 < value < LEAST_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", f"Input should be 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
    return value


Temperature = Annotated[float, Field(ge=0, le=5), AfterValidator(_greedy_or_warm)]
Effort = Literal["none", "minimal", "low", "medium", "high"]
HistoryReasoning = Literal["template", "drop", "inline"]
OnLength = Literal["keep", "drop", "continue"]


class EndpointSection(Frozen):
    """One OpenAI-compatible server of the target. ``api_key_env`` names an environment variable.

    ``model`` is its name there; None: the server serves one model only.
    """

    url: str = Field(pattern=r"^https?://")
    model: str | None = None
    concurrency: PositiveInt = 16
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class RegenerateSection(Frozen):
    """The target answers the training prompts itself (on-policy).

    With ``endpoints`` servers answer, without them the embedded engine does; ``precision`` (of its
    matrix products; residual stream, attention, norms and head keep ``target.dtype``) and
    ``batch_size`` are the embedded engine's.

    ``temperatures`` are spread over the prompts by a hash of each prompt's id, one named twice
    twice as often; ``top_p`` cuts the sampled ones. At most ``turns`` user turns of a conversation
    are asked. ``on_length`` says what becomes of an answer that was cut at ``max_new_tokens``:
    ``keep`` trains on what is there and never on an end that was not written, ``drop`` leaves it
    out, ``continue`` goes on up to ``continuations`` times and then keeps. ``history_reasoning``:
    what earlier answers' reasoning looks like to the next turn: as the chat template has it, not at
    all, or the answer's own text as it was written. ``effort`` and ``template_options`` go to the
    chat template.
    """

    precision: Literal["float32", "bfloat16"] = "float32"
    max_new_tokens: PositiveInt = 256
    temperatures: tuple[Temperature, ...] = Field(default=(0.0, 1.0), min_length=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    batch_size: PositiveInt = 64
    turns: PositiveInt = 8
    on_length: OnLength = "keep"
    continuations: PositiveInt = 4
    history_reasoning: HistoryReasoning = "template"
    effort: Effort | None = None
    template_options: dict[str, str | int | bool] = Field(default_factory=dict)
    endpoints: tuple[EndpointSection, ...] = ()
    timeout: float = Field(default=600.0, gt=0)
    attempts: PositiveInt = 6

    @model_validator(mode="after")
    def _endpoints_differ(self) -> RegenerateSection:
        urls = [endpoint.url.rstrip("/") for endpoint in self.endpoints]
        if len(set(urls)) < len(urls):
            raise ValueError("endpoints: names a server twice; raise its concurrency instead")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the answers: not where servers are, nor how patiently they are asked."""
        plain = self.model_dump(mode="json", exclude={"endpoints", "timeout", "attempts"})
        return {**plain, "served": bool(self.endpoints)}

    def most_new_tokens(self) -> int:
        """Generated tokens of one turn at most."""
        parts = 1 + (self.continuations if self.on_length == "continue" else 0)
        return self.max_new_tokens * parts
