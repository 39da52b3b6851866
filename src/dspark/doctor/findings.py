"""What an examination says: one :class:`Check` per question, in the order they were asked.

Every failed check carries a cause and a mend; the command line prints them and exits with 1. A
warning is something that one engine tolerates or that could not be settled; ``skip`` says why a
question was not asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One answered question.

    ``id`` is stable (``live.layers``); ``asked`` the question as a statement that should hold;
    ``found`` what was measured. ``cause`` and ``mend`` are set for ``fail`` and ``warn``;
    ``source`` names the document or code a rule stands on.
    """

    id: str
    status: Status
    asked: str
    found: str
    cause: str = ""
    mend: str = ""
    source: str = ""


def passed(id: str, asked: str, found: str, source: str = "") -> Check:
    return Check(id, "pass", asked, found, source=source)


def skipped(id: str, asked: str, why: str) -> Check:
    return Check(id, "skip", asked, why)


def failed(id: str, asked: str, found: str, cause: str, mend: str, source: str = "") -> Check:
    return Check(id, "fail", asked, found, cause, mend, source)


def warned(id: str, asked: str, found: str, cause: str, mend: str, source: str = "") -> Check:
    return Check(id, "warn", asked, found, cause, mend, source)


@dataclass
class Examination:
    """All checks of one checkpoint."""

    path: str
    engines: tuple[str, ...]
    layer_ids: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def add(self, *checks: Check) -> None:
        self.checks += checks

    def ids(self, status: Status) -> list[str]:
        """Identifiers of the checks with this status, in order."""
        return [check.id for check in self.checks if check.status == status]

    @property
    def sound(self) -> bool:
        return not self.ids("fail")

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        counts = {s: len(self.ids(s)) for s in ("pass", "warn", "fail", "skip")}
        return {
            "path": self.path,
            "engines": list(self.engines),
            "sound": self.sound,
            "counts": counts,
            "layer_ids": self.layer_ids,
            "checks": [asdict(check) for check in self.checks],
        }
