"""Stages in order: which folder each writes, what makes its work current, and who does it.

The only place that knows all stages. Each stage's fingerprint covers its recipe section, the
target's identity and its parents' manifests; current work is skipped, interrupted work resumed, and
work of another fingerprint moved aside. What a stage does lives in ``dspark.cli.stages``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.artifacts import (
    Kind,
    Parent,
    begin,
    finish,
    is_current,
    new_manifest,
    parent_of,
    read_manifest,
)
from dspark.cli.console import Screen
from dspark.config.recipe import Recipe
from dspark.errors import MissingArtifactError

if TYPE_CHECKING:
    from dspark.checkpoint.target import LoadedTarget

ORDER: tuple[Kind, ...] = ("prompts", "answers", "states", "draft", "bench")
PARENTS: dict[Kind, tuple[Kind, ...]] = {
    "prompts": (),
    "answers": ("prompts",),
    "states": ("answers",),
    "draft": ("states",),
    "bench": ("draft", "prompts"),
}
VERBS = {"answers": "regenerate", "states": "capture", "draft": "train"}


@dataclass(frozen=True)
class StageResult:
    """What a stage adds to its manifest, and one line for the screen."""

    counts: dict[str, int]
    notes: dict[str, Any]
    line: str


class Pipeline:
    """One recipe's run folder. ``command`` is what the user typed, for the report."""

    def __init__(self, recipe: Recipe, command: str, screen: Screen | None = None) -> None:
        self.recipe = recipe
        self.command = command
        self.screen = screen or Screen()
        self.root = Path(recipe.output)
        self.load_seconds = 0.0

    @cached_property
    def target_files(self) -> Any:
        from dspark.checkpoint.source import find_target

        return find_target(self.recipe.target.source, self.recipe.target.revision)

    @cached_property
    def target(self) -> LoadedTarget:
        """The target, loaded once and only when a stage needs it."""
        from dspark.checkpoint.target import load_target

        started = time.monotonic()
        with self.screen.bar(f"loading {self.recipe.target.source}", None):
            loaded = load_target(self.recipe.target)
        self.load_seconds = time.monotonic() - started
        runs = "our decoder" if loaded.config else f"transformers ({loaded.adapter_reason})"
        self.screen.stage("target", f"{self.recipe.target.source}, run by {runs}")
        return loaded

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal for work on this target to stay current."""
        files = self.target_files
        return {
            **self.recipe.target.model_dump(mode="json", exclude={"device"}),
            "found_revision": files.revision,
            "weights_hash": files.weights_hash(),
        }

    def folder(self, kind: Kind) -> Path:
        return self.root / kind

    def config_of(self, kind: Kind) -> dict[str, Any]:
        """What decides a stage's content, apart from its parents."""
        recipe = self.recipe
        section: dict[Kind, dict[str, Any]] = {
            "prompts": {"prompts": recipe.prompts},
            "answers": {"regenerate": recipe.regenerate},
            "states": {"capture": recipe.capture},
            "draft": {"draft": recipe.draft, "train": recipe.train},
            "bench": {"bench": recipe.bench, "workload": recipe.prompts.workload},
        }
        plain: dict[str, Any] = {"target": self.identity}
        for name, value in section[kind].items():
            plain[name] = (
                value.model_dump(mode="json") if hasattr(value, "model_dump") else list(value)
            )
        if kind == "states":
            ids = recipe.draft.target_layer_ids
            plain["layer_ids"] = None if ids is None else list(ids)
        return plain

    def parents(self, kind: Kind) -> list[Parent]:
        return [parent_of(self.folder(p), p, self.folder(kind)) for p in PARENTS[kind]]

    def run(self, last: str, *, only: bool) -> None:
        """Run up to ``last`` (``report`` = everything), or ``only`` that stage.

        Raises:
            MissingArtifactError: ``only``, and an earlier stage is unfinished (names the verb).
        """
        from dspark.cli.stages import RUNNERS, write_report_files

        wanted = ORDER if last == "report" else ORDER[: ORDER.index(last) + 1]
        for kind in wanted:
            if only and kind != last:
                self._require(kind)
                continue
            self._run_stage(kind, RUNNERS[kind])
        if last == "report":
            page = write_report_files(self)
            self.screen.stage("report", f"[bold]{page}[/]")

    def _require(self, kind: Kind) -> None:
        try:
            read_manifest(self.folder(kind), kind)
        except MissingArtifactError as error:
            verb = VERBS.get(kind, kind)
            raise MissingArtifactError(
                expected=error.expected,
                found=error.found,
                where=error.where,
                fix=f"Run `dspark {verb}` with this recipe first, or `dspark run` for all stages.",
            ) from error

    def _run_stage(self, kind: Kind, runner: Callable[[Pipeline, Path], StageResult]) -> None:
        folder = self.folder(kind)
        manifest = new_manifest(kind, self.config_of(kind), self.parents(kind))
        if is_current(folder, manifest.fingerprint):
            self.screen.stage(kind, f"finished before: {folder}")
            return
        begin(folder, manifest.fingerprint)
        started = time.monotonic()
        loaded = self.load_seconds
        result = runner(self, folder)
        seconds = time.monotonic() - started - (self.load_seconds - loaded)
        notes = {**result.notes, "seconds": round(seconds, 2)}
        with self.screen.bar(f"sealing {kind}", None):
            finish(folder, manifest.model_copy(update={"counts": result.counts, "notes": notes}))
        self.screen.stage(kind, f"{result.line} ({seconds:.0f} s)")

    def plan(self, last: str, *, only: bool) -> None:
        """Print what the stages would need; runs nothing."""
        from dspark.cli.plan import print_plan

        print_plan(self, ORDER if not only else (last,))
