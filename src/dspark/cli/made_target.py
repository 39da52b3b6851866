"""A target that the recipe says how to make: made by the first command that needs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dspark.artifacts import atomic_json
from dspark.cli.console import Screen
from dspark.config.made import MakeSection
from dspark.data.order_tickets import SYSTEM, order_tickets
from dspark.errors import ConfigError
from dspark.training.made_target import Messages, make_target

NOTE = "made.json"


def ensure_made(folder: Path, section: MakeSection, screen: Screen) -> None:
    """Make the target of ``section`` in ``folder``, unless it lies there.

    Raises:
        ConfigError: something else lies there.
    """
    settings = section.model_dump(mode="json")
    if folder.exists():
        _require_same(folder, settings)
        return
    working = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    conversations = conversations_of(section)
    with screen.bar(f"making {folder} (steps)", section.steps) as bar:
        loss = make_target(section, conversations, working, bar.advance)
    atomic_json(working / NOTE, {"settings": settings, "cross_entropy": loss})
    working.rename(folder)
    screen.stage("target", f"made {folder}, cross entropy {loss:.3f} nats a token")


def conversations_of(section: MakeSection) -> list[Messages]:
    """One to four orders each, with their answers."""
    found: list[list[dict[str, str]]] = []
    room = 0
    for _, ticket in order_tickets(section.seed, section.tickets, 0):
        if room == 0:
            found.append([{"role": "system", "content": SYSTEM}])
            room = 1 + len(found) % 4
        found[-1].append({"role": "user", "content": ticket.text})
        found[-1].append({"role": "assistant", "content": ticket.answer})
        room -= 1
    return list(found)


def _require_same(folder: Path, settings: dict[str, object]) -> None:
    try:
        found = json.loads((folder / NOTE).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found == settings:
        return
    raise ConfigError(
        expected="a target made with the settings of target.make",
        found="another model" if found is None else "one made with other settings",
        where=str(folder),
        fix="Name another folder in target.source, or delete this one.",
    )
