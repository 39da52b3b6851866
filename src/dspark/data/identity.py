"""What decides a prompt set besides the recipe's text: files and packages from outside.

A recipe names a prompt file by its path and an evaluation set by its package. Both can change while
the recipe does not, and work made from the old ones must not be taken for current. So a file counts
by its content, wherever it lies, and a package by its version.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from dspark.artifacts import sha256_file
from dspark.config.recipe import FileSource, PackageSource, PromptSource, ReasoningGymSource
from dspark.data.sources import PACKAGES
from dspark.errors import DataError, MissingDependencyError

GENERATOR = "reasoning-gym"


def source_identity(source: PromptSource) -> dict[str, Any]:
    """The settings of a source, with ``sha256`` of its file in place of the path, or with the
    ``package_version`` it reads or runs.

    Raises:
        DataError: the file cannot be read.
        MissingDependencyError: the package is not installed.
    """
    settings = source.model_dump(mode="json")
    if isinstance(source, FileSource):
        del settings["path"]
        return {**settings, "sha256": _content_hash(Path(source.path))}
    if isinstance(source, PackageSource):
        return {**settings, "package_version": _version(PACKAGES[source.kind][0], "--no-deps ")}
    if isinstance(source, ReasoningGymSource):
        return {**settings, "package_version": _version(GENERATOR, "")}
    return settings


def _content_hash(path: Path) -> str:
    try:
        return sha256_file(path)[1]
    except OSError as error:
        raise DataError(
            expected="a readable file of prompts",
            found=error.strerror or str(error),
            where=str(path),
            fix="Correct the path in prompts.sources; it is taken from the current folder.",
        ) from error


def _version(package: str, options: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            expected=f"the package {package}",
            found="it is not installed",
            where="prompts.sources",
            fix=f"pip install {options}{package}",
        ) from error
