"""``stage.json``: what an unfinished folder was begun for, how often it was tried, how far it is.

It is written when a stage begins, when an attempt ends, and when all of the work is done; it is
removed as the last act of sealing. Beside a manifest it therefore means that the process died
between the two, and the working files it names are only leftovers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, ValidationError

from dspark.artifacts.made import Attempt
from dspark.artifacts.storage import atomic_json
from dspark.config.architecture import Frozen

STAGE = "stage.json"
SCHEMA_VERSION = 1


class Done(Frozen):
    """A stage's result, kept when all its files are written and only the manifest is missing.

    ``working`` names files below the folder that only served to resume; they are no part of the
    artifact. ``files`` and ``bytes`` count the others, so that a folder somebody touched since is
    told from one that only waits to be sealed. ``line`` is what the screen says.
    """

    counts: dict[str, int]
    notes: dict[str, Any]
    line: str
    working: tuple[str, ...]
    files: NonNegativeInt
    bytes: NonNegativeInt


class StageRecord(Frozen):
    """The content of ``stage.json``. ``config`` and ``parents`` tell later what has changed."""

    tool: Literal["dspark"] = "dspark"
    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    config: dict[str, Any] | None = None
    parents: dict[str, str] | None = None
    attempts: tuple[Attempt, ...] = ()
    done: Done | None = None


def read_record(folder: Path) -> StageRecord | None:
    """What an unfinished folder was begun for; ``None`` when dspark did not begin it.

    A record of ours that this version cannot read has the fingerprint ``unreadable``, which is
    nobody's: its folder is moved aside, never resumed.
    """
    try:
        raw = json.loads((folder / STAGE).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or raw.get("tool") != "dspark":
        return None
    try:
        return StageRecord.model_validate(raw)
    except ValidationError:
        return StageRecord(fingerprint="unreadable")


def write_record(folder: Path, record: StageRecord) -> None:
    """Replace ``stage.json`` as a whole."""
    atomic_json(folder / STAGE, record.model_dump(mode="json"))
