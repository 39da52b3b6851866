"""``calibration.json`` beside a draft: temperatures of its confidence head, and for whom.

A temperature fitted to one draft says nothing of another, nor of the same draft trained further,
beside another target, or under another way of sampling. So the file names hashes of both, and each
of its modes names rule, draft method and temperature. Hashes that differ are an error when an
engine loads it; a mode that is not in it is simply not calibrated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from dspark.artifacts import atomic_json
from dspark.config.architecture import Frozen
from dspark.errors import CheckpointError

CALIBRATION = "calibration.json"
PAGE = "calibration.html"


class SlotFigures(Frozen):
    """Of one slot's survival: expected calibration error, area under the ROC curve (null where all
    outcomes were equal), Brier score."""

    ece: float
    auc: float | None
    brier: float


class BinFigures(Frozen):
    """One bar of the reliability diagram, all slots together."""

    predicted: float
    observed: float
    count: PositiveInt


class CalibratedMode(Frozen):
    """``temperatures`` [block size] for one way of sampling, from ``blocks`` whole blocks."""

    rule: Literal["greedy", "standard", "block"]
    one_hot: bool
    temperature: float = Field(ge=0)
    temperatures: tuple[PositiveFloat, ...]
    blocks: PositiveInt
    before: tuple[SlotFigures, ...]
    after: tuple[SlotFigures, ...]
    reliability_before: tuple[BinFigures, ...]
    reliability_after: tuple[BinFigures, ...]


class Calibration(Frozen):
    """The file. ``draft`` and ``target`` are hashes of ``dspark.checkpoint.identity``."""

    version: Literal[1] = 1
    draft: str
    target: str
    block_size: PositiveInt
    prompts: NonNegativeInt
    modes: tuple[CalibratedMode, ...]


def write_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write it into a draft's folder; returns the file."""
    path = folder / CALIBRATION
    atomic_json(path, calibration.model_dump(mode="json"))
    return path


def read_calibration(
    folder: Path, *, draft: str, target: str, block_size: int
) -> Calibration | None:
    """The calibration in a draft's folder, or None where there is no such file.

    Raises:
        CheckpointError: it is damaged, or was made for another draft or target.
    """
    path = folder / CALIBRATION
    try:
        found = Calibration.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        text = " ".join(str(error).split())[:200]
        raise _refused(path, "a calibration that dspark wrote", text) from error
    wanted = {"draft": draft, "target": target, "block_size": block_size}
    differing = [name for name, value in wanted.items() if getattr(found, name) != value]
    if any(len(mode.temperatures) != found.block_size for mode in found.modes):
        differing.append("number of temperatures")
    if differing:
        raise _refused(
            path,
            "a calibration of this draft beside this target",
            f"another {', '.join(differing)}",
        )
    return found


def _refused(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        expected=expected,
        found=found,
        where=str(path),
        fix="Run `dspark calibrate` on this draft again, or delete the file.",
    )
