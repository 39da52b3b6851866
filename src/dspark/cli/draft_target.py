"""Load a draft's target, with a bar and what differs on the screen."""

from __future__ import annotations

from pathlib import Path

from dspark.checkpoint.published import read_config
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.cli.console import Screen
from dspark.cli.naming import options_named
from dspark.pairing import check_pair, target_section

# There is no recipe here: the draft itself records the context it was made with.
NAMES = {"target.max_context": "target_max_context in the draft's config.json"}


def load_target_of(
    folder: Path, other: str | None, screen: Screen, *, max_context: int | None = None
) -> LoadedTarget:
    """The target of the draft in ``folder``, or ``other`` (a path, ``package:NAME`` or hub id).

    ``max_context`` asks for a longer context than the draft was trained with, as far as the draft
    was made for.

    Raises:
        CheckpointError, TargetError: see :func:`dspark.pairing.target_section` and
            :func:`dspark.pairing.check_pair`.
    """
    section = target_section(folder, other)
    if max_context is not None:
        config, _ = read_config(folder)
        longest = max(section.max_context, min(max_context, config.max_position_embeddings))
        section = section.model_copy(update={"max_context": longest})
    with options_named(NAMES), screen.bar(f"loading {section.source}", None):
        target = load_target(section)
    check_pair(folder, target, lambda text: screen.stage("warning", text), named=other is not None)
    return target
