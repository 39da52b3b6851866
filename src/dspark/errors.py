"""One small tree of errors, each saying what was expected, what was found, where, and what to do.

Every failure a user can cause is a :class:`DSparkError`. The command line prints the four parts and
exits with ``exit_code``; anything else that escapes is a bug in dspark and keeps its traceback.
"""

from __future__ import annotations

import importlib
from typing import Any


class DSparkError(Exception):
    """Base of everything dspark raises on purpose.

    Args:
        expected: what a sound input would have been.
        found: what was there instead.
        where: file, key path, tensor name or stage.
        fix: the next thing the user can do.
    """

    exit_code = 1

    def __init__(self, *, expected: str, found: str, where: str, fix: str) -> None:
        self.expected = expected
        self.found = found
        self.where = where
        self.fix = fix
        super().__init__(f"{where}: expected {expected}; found {found}. {fix}")


class ConfigError(DSparkError):
    """A recipe, an override or a config.json that must not be run."""

    exit_code = 2


class DataError(DSparkError):
    """Prompts or answers that are empty, unreadable or malformed."""


class ArtifactError(DSparkError):
    """An artifact folder that cannot be trusted."""


class MissingArtifactError(ArtifactError):
    """There is no finished artifact at this place."""


class DamagedArtifactError(ArtifactError):
    """A file of the artifact is absent, truncated or has another hash than its manifest says."""


class ForeignArtifactError(ArtifactError):
    """A folder of another kind, another schema version or another program."""


class BusyError(DSparkError):
    """Another process is writing into this folder; ``found`` names it."""


class CheckpointError(DSparkError):
    """Draft weights or config.json that do not make a sound draft."""


class QuantizationError(CheckpointError):
    """A draft that cannot be quantized: it is already, or it holds NaN or infinity."""


class TargetError(DSparkError):
    """A target model that cannot be loaded or whose states cannot be tapped."""


class SelfTestError(TargetError):
    """Captured states do not reproduce the target's own tokens (wrong norm, wrong layer)."""


class TrainingError(DSparkError):
    """Training that cannot give a meaningful draft (no anchors, non-finite loss)."""


class StreamError(DSparkError):
    """A stream of hidden states that stands still or breaks; ``where`` names the starving stage."""


class DecodingError(DSparkError):
    """An unsupported combination of verification mode, draft sampling and parameters."""


class EngineProcessError(DSparkError):
    """Another engine's process that ended without doing what it was asked."""


class PageError(DSparkError):
    """A page of cached rows that must not be read; the rows are computed again instead."""


class DamagedPageError(PageError):
    """Truncated, or its bytes are not those that were written."""


class ForeignPageError(PageError):
    """No page of ours, another format version, or rows of another shape or number format."""


class StalePageError(PageError):
    """A sound page of other weights, or of another text."""


class EndpointError(DSparkError):
    """A server that is not there, refuses a request, or does not tell the truth; names it.

    ``status`` is the HTTP status of a refusal, None for everything else.
    """

    status: int | None = None


class MissingDependencyError(DSparkError):
    """An optional package is not installed; ``fix`` names the extra that brings it."""


def optional_module(name: str, *, expected: str, where: str, fix: str) -> Any:
    """Module ``name`` of a package that need not be installed.

    Raises:
        MissingDependencyError: with the given words.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            expected=expected, found=str(error), where=where, fix=fix
        ) from error


class StorageError(DSparkError):
    """Disk full or not writable; what was complete before stays readable."""
