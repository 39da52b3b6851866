"""The account of a set of answers: how they ended, how long they are, how much is trained on.

``answers/report.json`` is this schema and ``report.html`` shows it. Truncation is counted by the
engine's own finish reasons: a set in which a third of the answers is cut must say so.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from pydantic import NonNegativeInt

from dspark.artifacts import atomic_json, atomic_write
from dspark.config.architecture import Frozen
from dspark.errors import DataError
from dspark.page import page_environment

REPORT = "report.json"
PAGE = "report.html"
EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lower ends of the length histogram's bins (trained tokens of a row); the last one is open."""


class AnswerCategory(Frozen):
    """One category: prompts that were asked, rows, tokens, and how its turns ended.

    ``coverage`` is the trained share of all tokens, ``truncated`` the share of turns that were cut;
    ``dropped`` counts prompts and turns that gave nothing, by reason.
    """

    category: str
    prompts: NonNegativeInt
    rows: NonNegativeInt
    tokens: NonNegativeInt
    trained: NonNegativeInt
    coverage: float
    truncated: float
    finish_reasons: dict[str, int]
    dropped: dict[str, int]
    histogram: tuple[NonNegativeInt, ...]


class AnswerMaker(Frozen):
    """Who wrote ``rows`` of the rows."""

    model: str
    revision: str | None
    server: str
    rows: NonNegativeInt


class AnswerReport(Frozen):
    """``report.json`` of an answers folder; the fields of :class:`AnswerCategory` for all of them,
    and besides: rows of each temperature, later turns that were asked and that were not (by the
    reason), who answered, and endpoints that were lost on the way."""

    prompts: NonNegativeInt
    rows: NonNegativeInt
    tokens: NonNegativeInt
    trained: NonNegativeInt
    coverage: float
    truncated: float
    finish_reasons: dict[str, int]
    dropped: dict[str, int]
    categories: tuple[AnswerCategory, ...]
    temperatures: dict[str, int]
    later_turns_asked: NonNegativeInt
    later_turns_left: dict[str, int]
    length_edges: tuple[int, ...]
    makers: tuple[AnswerMaker, ...]
    lost_endpoints: dict[str, str]
    notes: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """For the manifest."""
        return {"answers": self.rows, "tokens": self.trained, "prompts": self.prompts}

    def line(self) -> str:
        """For the screen."""
        text = f"{self.rows} answers, {self.trained:,} tokens, {self.truncated:.1%} cut"
        if self.dropped:
            text += "; dropped: " + ", ".join(f"{n} {why}" for why, n in self.dropped.items())
        return text


class _Sum:
    """Figures of a category while they are added up."""

    def __init__(self) -> None:
        self.prompts = self.rows = self.tokens = self.trained = 0
        self.finish: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.histogram = [0] * len(EDGES)

    def figures(self) -> dict[str, Any]:
        turns = self.finish.total()
        return {
            "prompts": self.prompts,
            "rows": self.rows,
            "tokens": self.tokens,
            "trained": self.trained,
            "coverage": self.trained / max(self.tokens, 1),
            "truncated": self.finish["length"] / max(turns, 1),
            "finish_reasons": dict(self.finish.most_common()),
            "dropped": dict(self.dropped.most_common()),
        }


class AnswerAccount:
    """Adds up the headers of finished conversations (:mod:`dspark.data.answer_journal`)."""

    def __init__(self) -> None:
        self._all = _Sum()
        self._parts: dict[str, _Sum] = {}
        self._temperatures: Counter[str] = Counter()
        self._makers: Counter[tuple[str, str | None, str]] = Counter()
        self._left: Counter[str] = Counter()
        self._asked = 0

    def add(self, category: str, header: dict[str, Any]) -> None:
        """One prompt's record."""
        part = self._parts.setdefault(category, _Sum())
        for total in (self._all, part):
            total.prompts += 1
            for name, count in header["tally"].items():
                kind, _, what = name.partition(" ")
                if kind == "finish":
                    total.finish[what] += count
                elif kind == "dropped":
                    total.dropped[what] += count
            for facts in header["facts"]:
                total.rows += 1
                total.tokens += facts["tokens"]
                total.trained += facts["trained"]
                total.histogram[_bin(facts["trained"])] += 1
        for name, count in header["tally"].items():
            if name.startswith("later turns after "):
                self._left[name.removeprefix("later turns after ")] += count
        turns = sum(facts["turns"] for facts in header["facts"])
        self._asked += max(turns - 1, 0)
        for facts in header["facts"]:
            self._temperatures[f"{facts['temperature']:g}"] += 1
            if facts["maker"] is not None:
                model, revision, server = facts["maker"]
                self._makers[model, revision, server] += 1

    def report(self, lost: dict[str, str], notes: tuple[str, ...]) -> AnswerReport:
        """The finished report.

        Raises:
            DataError: nothing, or everything, would be trained on.
        """
        whole = self._all
        if whole.trained in {0, whole.tokens}:
            reasons = {**whole.finish, **{f"dropped {k}": n for k, n in whole.dropped.items()}}
            raise DataError(
                expected="answers of at least two tokens, and prompts before them",
                found=f"a loss mask that covers {100 if whole.trained else 0} % of {whole.tokens} "
                f"tokens; {whole.prompts} prompts, {reasons}",
                where="regenerate",
                fix="Raise regenerate.max_new_tokens or keep truncated answers, and check that the "
                "target answers at all.",
            )
        return AnswerReport(
            **whole.figures(),
            categories=tuple(
                AnswerCategory(category=name, histogram=tuple(part.histogram), **part.figures())
                for name, part in self._parts.items()
            ),
            temperatures=dict(sorted(self._temperatures.items())),
            later_turns_asked=self._asked,
            later_turns_left=dict(self._left.most_common()),
            length_edges=EDGES,
            makers=tuple(
                AnswerMaker(model=model, revision=revision, server=server, rows=rows)
                for (model, revision, server), rows in sorted(
                    self._makers.items(), key=lambda pair: str(pair[0])
                )
            ),
            lost_endpoints=lost,
            notes=notes,
        )


def _bin(length: int) -> int:
    return max(sum(length >= edge for edge in EDGES) - 1, 0)


def write_answer_report(folder: Path, report: AnswerReport) -> None:
    """``report.json`` and ``report.html``. Raises StorageError where they cannot be written."""
    atomic_json(folder / REPORT, report.model_dump(mode="json"))
    atomic_write(folder / PAGE, render_answers(report))


def render_answers(report: AnswerReport) -> str:
    """The page as a string; everything textual is escaped."""
    labels = [
        f"{low:,} to {high - 1:,}"
        for low, high in zip(report.length_edges, report.length_edges[1:], strict=False)
    ]
    return _template().render(report=report, labels=[*labels, f"{report.length_edges[-1]:,}+"])


@cache
def _template() -> Template:
    return page_environment("dspark.data").get_template("answers.html.j2")
