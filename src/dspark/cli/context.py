"""One run: its recipe, its folder, its screen and its target, loaded once and only when needed.

Stages, plan and report all work on a :class:`RunContext`; ``dspark.cli.pipeline`` decides which
stage runs when.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dspark.artifacts import Kind, Origin
from dspark.cli.console import Screen
from dspark.config.recipe import Recipe
from dspark.config.target import TargetShape

if TYPE_CHECKING:
    from dspark.checkpoint.identity import FileHashes
    from dspark.checkpoint.source import TargetFiles
    from dspark.checkpoint.target import LoadedTarget
    from dspark.data.filters.evaluation import TaskItems


# Stages that a mode of training does without: the teacher does their work while training.
LEFT_OUT: dict[str, tuple[Kind, ...]] = {
    "offline": (),
    "replay": ("states",),
    "online": ("answers", "states"),
}


@dataclass(frozen=True)
class StageResult:
    """What a stage adds to its manifest, and one line for the screen.

    ``working`` names files in the stage's folder that only served to resume it.
    """

    counts: dict[str, int]
    notes: dict[str, Any]
    line: str
    working: tuple[str, ...] = ()


class RunContext:
    """``command`` is what the user typed, for the report."""

    def __init__(self, recipe: Recipe, command: str, screen: Screen | None = None) -> None:
        self.recipe = recipe
        self.command = command
        self.screen = screen or Screen(None if self.leads else Console(quiet=True))
        self.root = Path(recipe.output)
        self.load_seconds = 0.0

    @cached_property
    def target_files(self) -> TargetFiles:
        """Where the target is; a hub id is not downloaded for it."""
        from dspark.checkpoint.source import TargetFiles, find_target

        section = self.recipe.target
        if section.make is not None and not Path(section.source).exists():
            return TargetFiles(section.source, section.source, None, None)
        return find_target(section.source, section.revision)

    @cached_property
    def fetched_files(self) -> TargetFiles:
        """The target's files on this machine: downloads a hub id that is not in the cache, makes
        what the recipe says how to make."""
        from dspark.checkpoint.source import fetch

        if self.recipe.target.make is not None:
            from dspark.cli.made_target import ensure_made

            ensure_made(Path(self.recipe.target.source), self.recipe.target.make, self.screen)
        return fetch(self.target_files)

    @cached_property
    def file_hashes(self) -> FileHashes:
        """Identity of the target's files, read once a run."""
        from dspark.checkpoint.identity import file_hashes

        return file_hashes(self.fetched_files)

    @cached_property
    def shape(self) -> TargetShape:
        """The target's sizes: from the recipe, or else from its config alone."""
        from dspark.checkpoint.sizes import read_sizes

        return read_sizes(self.recipe.target, self.target_files).shape

    @cached_property
    def target(self) -> LoadedTarget:
        """The target, loaded once and only when a stage needs it."""
        from dspark.checkpoint.target import load_target

        files = self.fetched_files  # before the bar: a download draws its own
        started = time.monotonic()
        with self.screen.bar(f"loading {self.recipe.target.source}", None):
            loaded = load_target(self.recipe.target, files)
        self.load_seconds = time.monotonic() - started
        runs = "our decoder" if loaded.config else f"transformers ({loaded.adapter_reason})"
        self.screen.stage("target", f"{self.recipe.target.source}, run by {runs}")
        return loaded

    @cached_property
    def origin(self) -> Origin:
        """Command, code and machine, for the record of every stage that runs here."""
        from dspark.cli.origin import origin_of

        return origin_of(self.command)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal for work on this target to stay current."""
        hashes = self.file_hashes
        return {
            **self.recipe.target.model_dump(mode="json", exclude={"device", "sizes", "make"}),
            "found_revision": self.fetched_files.revision,
            "weights_hash": hashes.weights,
            "config_hash": hashes.config,
            "tokenizer_files_hash": hashes.tokenizer_files,
        }

    @cached_property
    def task_items(self) -> TaskItems | None:
        """Benchmarks that training prompts must not contain, as far as the recipe names any."""
        from dspark.cli.task_items import task_items

        return task_items(self.recipe.prompts)

    @cached_property
    def start_hash(self) -> str | None:
        """Content hash of the draft that ``train.init_from`` names, None without one."""
        from dspark.checkpoint.draft import content_hash

        start = self.recipe.train.init_from
        return None if start is None else content_hash(Path(start))

    @property
    def data_kind(self) -> Kind:
        """The artifact that training reads: states, or what a teacher makes them of."""
        kinds: dict[str, Kind] = {"offline": "states", "replay": "answers", "online": "prompts"}
        return kinds[self.recipe.train.mode]

    @property
    def ranks(self) -> int:
        """How many processes of ``torchrun`` share this command; 1 without it."""
        return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0

    @property
    def leads(self) -> bool:
        """Whether this process writes artifacts and speaks."""
        return self.rank == 0

    def folder(self, kind: Kind) -> Path:
        return self.root / kind
