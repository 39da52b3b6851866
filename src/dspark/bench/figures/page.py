"""Results of a suite, and a comparison, as one inert HTML page each (see :mod:`dspark.page`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from dspark.bench.figures.comparison import Comparison
from dspark.bench.figures.schema import Acceptance, ArmFigures, SuiteResults
from dspark.bench.figures.tables import card_rows, detail_rows, pair_rows
from dspark.bench.svg import SERIES, Plot, panel
from dspark.page import page_environment

_MARKERS = ("o", "s", "^", "D")


def render_suite(results: SuiteResults) -> str:
    """The page as a string.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    return (
        _environment()
        .get_template("suite.html.j2")
        .render(
            title=f"{results.suite}: {results.name}",
            lead=f"Draft: {_told(results.draft)}",
            notices=[*results.notices, *_arm_notices(results.arms)],
            tables=[
                ("Acceptance length", *card_rows(results)),
                ("In detail", *detail_rows(results)),
            ],
            plots=suite_plots(results.arms),
            missing=results.missing,
            facts=_facts(results),
        )
    )


def render_comparison(comparison: Comparison, sides: Sequence[SuiteResults]) -> str:
    """The page as a string. Raises as :func:`render_suite`."""
    verdicts = [o.verdict for o in comparison.overall]
    differ = [f"Besides the draft, this differs: {text}." for text in comparison.stack_differences]
    return (
        _environment()
        .get_template("suite.html.j2")
        .render(
            title=f"{comparison.a} beside {comparison.b}",
            lead=" ".join(verdicts),
            notices=[*differ, *comparison.notices],
            tables=[("Prompt by prompt", *pair_rows(comparison))],
            plots=_pair_plots(comparison),
            missing={},
            facts=[pair for side in sides for pair in _facts(side)],
        )
    )


def suite_plots(arms: Sequence[ArmFigures]) -> list[Plot]:
    """Slots, output position and context length of every arm that has them."""
    plots = []
    by_task = itertools.groupby(arms, key=lambda arm: arm.task)
    for task, group in by_task:
        own = list(group)
        slots = {a.temperature: a.acceptance for a in own if a.acceptance is not None}
        told = {t: a.unconditional for t, a in slots.items() if a.unconditional}
        if told:
            plots.append(_slots(task, own[0].title, told))
        for name, title in (("by_position", "by position"), ("by_context", "by context")):
            groups = {a.temperature: getattr(a, name) for a in own}
            if any(len(g) > 1 for g in groups.values()):
                plots.append(_buckets(f"{name}-{task}", f"{own[0].title}, {title}", groups))
    lengths = [a for a in arms if a.task.startswith("long_") and a.acceptance is not None]
    if len(lengths) > 1:
        plots.append(_by_length(lengths))
    return plots


def _slots(task: str, title: str, told: Mapping[float, Sequence[float]]) -> Plot:
    def draw(axes: Any) -> None:
        for index, (temperature, shares) in enumerate(sorted(told.items())):
            axes.plot(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                marker=_MARKERS[index % 4],
                color=SERIES[index % len(SERIES)],
                label=f"T = {temperature:g}",
            )
        axes.set(xlabel="slot in the block", ylabel="% of steps accepted", ylim=(0, 100))
        axes.legend(loc="upper right")

    text = " ".join(
        f"T = {t:g}: " + ", ".join(f"{100 * s:.0f} %" for s in shares) + "."
        for t, shares in sorted(told.items())
    )
    return panel(f"slots-{task}", f"{title}, by slot", text, draw)


def _buckets(name: str, title: str, groups: Mapping[float, Mapping[str, Acceptance]]) -> Plot:
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))

    def draw(axes: Any) -> None:
        for index, (temperature, group) in enumerate(sorted(groups.items())):
            points = [(labels.index(k), v) for k, v in group.items() if v.length is not None]
            axes.errorbar(
                [place for place, _ in points],
                [v.length for _, v in points],
                yerr=_errors([v for _, v in points]),
                marker=_MARKERS[index % 4],
                color=SERIES[index % len(SERIES)],
                capsize=2,
                label=f"T = {temperature:g}",
            )
        axes.set_xticks(range(len(labels)), labels)
        axes.set(xlabel="tokens", ylabel="acceptance length")
        axes.set_ylim(bottom=1)
        axes.legend(loc="upper right")

    text = " ".join(
        f"T = {t:g}: " + ", ".join(f"{k} {v.length:.2f}" for k, v in g.items() if v.length) + "."
        for t, g in sorted(groups.items())
    )
    return panel(name, title, text, draw)


def _by_length(arms: Sequence[ArmFigures]) -> Plot:
    groups: dict[float, dict[str, Acceptance]] = {}
    for arm in arms:
        assert arm.acceptance is not None
        groups.setdefault(arm.temperature, {})[arm.task.removeprefix("long_")] = arm.acceptance
    return _buckets("by-length", "Acceptance by length of context", groups)


def _pair_plots(comparison: Comparison) -> list[Plot]:
    told = [p for p in comparison.pairs if p.ratio is not None]
    if not told:
        return []

    def draw(axes: Any) -> None:
        for place, pair in enumerate(reversed(told)):
            low, high = pair.ratio_interval or (pair.ratio, pair.ratio)
            axes.plot([low, high], [place, place], color=SERIES[0], lw=2)
            axes.plot([pair.ratio], [place], "o", color=SERIES[0])
        axes.axvline(1, color=SERIES[1], lw=1, ls="--")
        axes.set_yticks(
            range(len(told)), [f"{p.title} T={p.temperature:g}" for p in reversed(told)]
        )
        axes.set(xlabel=f"{comparison.a} / {comparison.b}")

    text = "; ".join(f"{p.title} at T = {p.temperature:g}: {p.ratio:.3f}" for p in told)
    return [panel("ratios", "Ratio of acceptance lengths, 95 %", f"{text}.", draw)]


def _errors(values: Sequence[Acceptance]) -> list[list[float]] | None:
    if any(v.interval is None or v.length is None for v in values):
        return None
    low = [max(0.0, (v.length or 0) - (v.interval or (0, 0))[0]) for v in values]
    high = [max(0.0, (v.interval or (0, 0))[1] - (v.length or 0)) for v in values]
    return [low, high]


def _arm_notices(arms: Sequence[ArmFigures]) -> list[str]:
    return [f"{a.title} at T = {a.temperature:g}: {text}" for a in arms for text in a.notices]


def _facts(results: SuiteResults) -> list[tuple[str, str]]:
    flat = {**results.stack, **{f"draft {k}": v for k, v in results.draft.items()}}
    flat |= {f"setting {k}": v for k, v in results.settings.model_dump(mode="json").items()}
    flat |= {k: results.made.get(k) for k in ("command", "commit", "machine")}
    return [(name, _told(value)) for name, value in flat.items() if value is not None]


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_told(v)}" for k, v in value.items() if v is not None)
    return str(value)


@cache
def _environment() -> Environment:
    environment = page_environment("dspark.bench")
    environment.filters["svg"] = lambda plot: Markup(plot.svg)
    return environment
