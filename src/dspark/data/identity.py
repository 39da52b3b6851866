"""What decides a prompt set besides the recipe's text: files and packages from outside.

A recipe names files by path and benchmarks by package. Both can change while the recipe does not,
and work made from the old ones must not be taken for current. So a file counts by its content,
wherever it lies, a package by its version, and a hub data set by its pinned commit.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from dspark.artifacts import sha256_file
from dspark.config.prompts import (
    FileSource,
    PackageSource,
    PromptSource,
    PromptsSection,
    ReasoningGymSource,
    TrafficSource,
)
from dspark.data.filters.evaluation import TaskItems
from dspark.data.packages import PACKAGES
from dspark.data.records import record_files
from dspark.errors import DataError, MissingDependencyError

GENERATOR = "reasoning-gym"


def section_identity(section: PromptsSection, tasks: TaskItems | None = None) -> dict[str, Any]:
    """The section as plain JSON with content hashes and versions in place of paths.

    ``tasks``: of the benchmarks that ``filters.contamination.tasks`` names.

    Raises:
        DataError: a file that it names cannot be read.
        MissingDependencyError: a package that it names is not installed.
    """
    plain = section.model_dump(mode="json")
    plain["sources"] = [source_identity(source) for source in section.sources]
    wanted = section.filters.contamination
    if wanted is not None:
        compared = plain["filters"]["contamination"]
        compared["tasks"] = {} if tasks is None else tasks.identity
        del compared["data"]
        compared["against"] = [_content(Path(path)) for path in wanted.against]
        kinds = PACKAGES if wanted.benchmarks == "installed" else wanted.benchmarks
        compared["benchmarks"] = {kind: _installed(PACKAGES[kind][0]) for kind in kinds}
    return plain


def source_identity(source: PromptSource) -> dict[str, Any]:
    """The settings of a source, with the hashes of its files in place of the path, or with the
    ``package_version`` it reads or runs.

    Raises:
        DataError: a file cannot be read.
        MissingDependencyError: the package is not installed.
    """
    settings = source.model_dump(mode="json")
    if isinstance(source, (FileSource, TrafficSource)):
        del settings["path"]
        return {**settings, "sha256": _content(Path(source.path))}
    if isinstance(source, PackageSource):
        return {**settings, "package_version": _version(PACKAGES[source.kind][0], "--no-deps ")}
    if isinstance(source, ReasoningGymSource):
        return {**settings, "package_version": _version(GENERATOR, "")}
    return settings


def _content(path: Path) -> list[list[str]]:
    """Name below ``path`` and sha256 of each file; a single file counts without its name."""
    found = []
    for file in record_files(path):
        name = "" if file == path else file.relative_to(path).as_posix()
        try:
            found.append([name, sha256_file(file)[1]])
        except OSError as error:
            raise DataError(
                expected="a readable file of prompts",
                found=error.strerror or str(error),
                where=str(file),
                fix="Grant read permission to this user.",
            ) from error
    return found


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(package: str, options: str) -> str:
    version = _installed(package)
    if version is None:
        raise MissingDependencyError(
            expected=f"the package {package}",
            found="it is not installed",
            where="prompts.sources",
            fix=f"pip install {options}{package}",
        )
    return version
