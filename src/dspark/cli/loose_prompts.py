"""Options of ``dspark prompts`` that take a recipe's place, and the recipe they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from dspark.config.prompts import (
    Contamination,
    FileSource,
    FiltersSection,
    NearDuplicates,
    PromptsSection,
    TokenizerSection,
    TrafficSource,
)
from dspark.config.recipe import DataRecipe
from dspark.data.prompts import NOTHING_LEFT
from dspark.data.shapes import SHAPES
from dspark.errors import ConfigError

CATEGORY = "general"
# What library errors advise to somebody with a recipe, and what helps here.
NAMES = {
    NOTHING_LEFT: f"Rows are known by one of {', '.join(SHAPES)} (docs/data.md). Name other files "
    "with --input, or write a recipe, which can have other limits and filters.",
    "prompts.sources": "--input, --traffic",
}


@dataclass(frozen=True)
class Loose:
    """What takes the place of a recipe."""

    inputs: tuple[Path, ...]
    traffic: tuple[Path, ...]
    against: tuple[Path, ...]
    tasks: tuple[str, ...]
    data: Path | None
    out: Path | None
    tokenizer: str | None
    scrub: str | None

    def given(self) -> list[str]:
        """The options that were used."""
        values = {
            "--input": self.inputs,
            "--traffic": self.traffic,
            "--against": self.against,
            "--tasks": self.tasks,
            "--data": self.data,
            "--out": self.out,
            "--tokenizer": self.tokenizer,
            "--scrub": self.scrub,
        }
        return [name for name, value in values.items() if value]


def loose_recipe(loose: Loose) -> tuple[DataRecipe, Path]:
    """The recipe of prompts alone that ``loose`` stands for, and the folder it writes.

    Raises:
        ConfigError: options that are missing or do not go together.
    """
    if not loose.inputs and not loose.traffic:
        refuse(
            "a recipe, or --input FILE --out DIR",
            f"neither ({', '.join(loose.given()) or 'no option'})",
            "For example: dspark prompts --input FILE --against EVAL_FILE --out DIR",
        )
    if loose.out is None:
        refuse("--out DIR", "no --out", "Name the folder to write.")
    if loose.scrub is not None and not loose.traffic:
        refuse("--scrub with --traffic", "no --traffic", "Only logs of requests are scrubbed.")
    sources: list[FileSource | TrafficSource] = [
        FileSource(kind="file", path=str(path), category=CATEGORY, train="all")
        for path in loose.inputs
    ]
    try:
        sources += [
            TrafficSource(
                kind="traffic", path=str(path), train="all", scrub=loose.scrub or "default"
            )
            for path in loose.traffic
        ]
    except ValidationError as error:
        raise ConfigError(
            expected="default, none, or module:function",
            found=repr(loose.scrub),
            where="dspark prompts --scrub",
            fix="Name a function as package.module:function.",
        ) from error
    section = PromptsSection(
        sources=tuple(sources),
        workload=tuple(dict.fromkeys(source.category for source in sources)),
        filters=FiltersSection(
            misshapen="drop",
            near_duplicate=NearDuplicates(),
            contamination=Contamination(
                against=tuple(map(str, loose.against)),
                tasks="all" if "all" in loose.tasks else loose.tasks,
                data=None if loose.data is None else str(loose.data),
            ),
        ),
    )
    tokenizer = None if loose.tokenizer is None else TokenizerSection(source=loose.tokenizer)
    return (
        DataRecipe(name="prompts", output=str(loose.out), tokenizer=tokenizer, prompts=section),
        loose.out,
    )


def refuse(expected: str, found: str, fix: str) -> NoReturn:
    """A fault in how the verb was called."""
    raise ConfigError(expected=expected, found=found, where="dspark prompts", fix=fix)
