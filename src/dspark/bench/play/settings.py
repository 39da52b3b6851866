"""How a suite is asked: the settings a user may change, all of which are part of a result."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from dspark.bench.tasks.task import Thinking
from dspark.config.architecture import Frozen
from dspark.config.load import parse_yaml
from dspark.errors import ConfigError

Temperature = Annotated[float, Field(ge=0, le=5)]


class SuiteSettings(Frozen):
    """``dspark bench ... --suite NAME key=value``.

    Args:
        temperatures: every question is asked at each. The cards' columns are 0 and 1.
        top_p: at temperatures above 0 only.
        concurrency: requests in flight. 1 gives clean times and, from a server with counters only,
            acceptance of every single request.
        warm_up: answers before measuring, not counted.
        timeout: seconds for one answer; more is counted as a failure.
        prompts: at most so many questions of a task, at even distances; None asks all.
        max_tokens: cut answers here instead of where the tasks say.
        thinking: instead of what the tasks say; ``default`` leaves it to the chat template.
        seed: of sampling, of the bootstrap and of the order.
        tries: of one request that fails before its first piece.
        skip_missing: measure the tasks whose data is at hand and name the others.
        grade: check answers where the data holds what is needed.
        verification, draft_sample_method: of our own engine; refused with a server, which was
            started with its own.
        note: shown with the results; what else the machine was doing, say.
    """

    temperatures: tuple[Temperature, ...] = Field(default=(0.0, 1.0), min_length=1)
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    concurrency: PositiveInt = 1
    warm_up: NonNegativeInt = 1
    timeout: PositiveFloat = 600.0
    prompts: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    thinking: Thinking | None = None
    seed: NonNegativeInt = 0
    tries: PositiveInt = 4
    skip_missing: bool = False
    grade: bool = True
    verification: Literal["standard", "block"] = "block"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    note: str | None = None


ENGINE_ONLY = ("verification", "draft_sample_method")


def require_server_settings(settings: SuiteSettings) -> None:
    """Refuse what a server would not do, instead of leaving it out in silence.

    Raises:
        ConfigError: a setting of our own engine.
    """
    for name in ENGINE_ONLY:
        if name in settings.model_fields_set:
            raise ConfigError(
                expected=f"{name} with a draft folder: a server is started with its own",
                found=f"{name}={getattr(settings, name)} with a server",
                where="dspark bench",
                fix=f"Leave {name} out, and start the server with it.",
            )


def settings_from(overrides: list[str]) -> SuiteSettings:
    """Settings from ``key=value`` pairs; a leading ``bench.`` may be written.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or range.
    """
    data: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise _refused("key=value", repr(text), text)
        data[key.strip().removeprefix("bench.")] = parse_yaml(value, f"override {text!r}")
    try:
        return SuiteSettings.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        known = ", ".join(SuiteSettings.model_fields)
        raise _refused(
            f"one of {known}", f"{place}: {first['msg']}", " ".join(overrides)
        ) from error


def _refused(expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=where,
        fix="For example: concurrency=8 temperatures=[0,1] prompts=32 max_tokens=256",
    )
