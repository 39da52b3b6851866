"""``report.html`` of a prompt set, made from ``report.json``'s schema and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Template

from dspark.artifacts import atomic_write
from dspark.page import page_environment

if TYPE_CHECKING:
    from dspark.data.prompt_report import PromptReport

PAGE = "report.html"
_MOST_HITS = 100


def render_page(report: PromptReport) -> str:
    """The page as a string; everything textual is escaped."""
    steps = [step.step for step in report.funnel if step.dropped]
    labels = [
        f"{low:,} to {high - 1:,}"
        for low, high in zip(report.length_edges, report.length_edges[1:], strict=False)
    ]
    return _template().render(
        report=report,
        steps=steps,
        labels=[*labels, f"{report.length_edges[-1]:,} and more"],
        hits=report.contamination.first_hits[:_MOST_HITS],
    )


def write_page(folder: Path, report: PromptReport) -> Path:
    """Write the page and return its path. Raises StorageError where it cannot be written."""
    path = folder / PAGE
    atomic_write(path, render_page(report))
    return path


@cache
def _template() -> Template:
    return page_environment("dspark.data").get_template("prompts.html.j2")
