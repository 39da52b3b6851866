"""Load a draft's target, with a bar and what differs on the screen."""

from __future__ import annotations

from pathlib import Path

from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.cli.console import Screen
from dspark.pairing import check_pair, target_section


def load_target_of(folder: Path, other: str | None, screen: Screen) -> LoadedTarget:
    """The target of the draft in ``folder``, or ``other`` (a path, ``package:NAME`` or hub id).

    Raises:
        CheckpointError, TargetError: see :func:`dspark.pairing.target_section` and
            :func:`dspark.pairing.check_pair`.
    """
    section = target_section(folder, other)
    with screen.bar(f"loading {section.source}", None):
        target = load_target(section)
    check_pair(folder, target, lambda text: screen.stage("warning", text), named=other is not None)
    return target
