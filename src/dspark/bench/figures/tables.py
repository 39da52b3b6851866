"""Results as tables, in the column layout of published cards: benchmark, T=0, T=1, prompts."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.bench.figures.comparison import Comparison
from dspark.bench.figures.schema import ArmFigures, Interval, SuiteResults


def card_rows(results: SuiteResults) -> tuple[list[str], list[list[str]]]:
    """Header and rows; the last row is the mean over benchmarks, where all have a figure.

    A benchmark that was shortened shows ``8 of 164``: it is not the published figure.
    """
    temperatures = sorted({arm.temperature for arm in results.arms})
    names = list(dict.fromkeys(arm.task for arm in results.arms))
    arms = {(arm.task, arm.temperature): arm for arm in results.arms}
    header = ["benchmark", *(f"T={t:g} (95 %)" for t in temperatures), "prompts"]
    rows = []
    for name in names:
        own = [arms.get((name, t)) for t in temperatures]
        whole = next(arm for arm in own if arm is not None)
        cells = ["-" if arm is None else length_cell(arm) for arm in own]
        rows.append([whole.title, *cells, _prompts(whole)])
    means = [_mean([arms.get((name, t)) for name in names]) for t in temperatures]
    if len(names) > 1:
        rows.append(["mean", *means, str(len(names)) + " benchmarks"])
    rows += [[name, *["not run"] * len(temperatures), "-"] for name in results.missing]
    return header, rows


def length_cell(arm: ArmFigures) -> str:
    """``5.10 (4.91 to 5.28)``, or a dash."""
    if arm.acceptance is None or arm.acceptance.length is None:
        return "-"
    return f"{arm.acceptance.length:.2f}{_interval(arm.acceptance.interval)}"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def _prompts(arm: ArmFigures) -> str:
    return str(arm.asked) if arm.asked == arm.available else f"{arm.asked} of {arm.available}"


def _mean(arms: Sequence[ArmFigures | None]) -> str:
    lengths = [a.acceptance.length if a is not None and a.acceptance else None for a in arms]
    told = [length for length in lengths if length is not None]
    return "-" if len(told) < len(arms) else f"{sum(told) / len(told):.2f}"


def detail_rows(results: SuiteResults) -> tuple[list[str], list[list[str]]]:
    """One row an arm: rates, speed, quality and what went wrong."""
    header = [
        "benchmark", "T", "per prompt", "of drafted", "of admitted", "tok/fwd", "tok/s", "TTFT ms",
        "TPOT ms", "right", "cut", "failed",
    ]  # fmt: skip
    return header, [_detail(arm) for arm in results.arms]


def _detail(arm: ArmFigures) -> list[str]:
    own, speed, quality = arm.acceptance, arm.speed, arm.quality
    return [
        arm.title,
        f"{arm.temperature:g}",
        number(own.length_per_prompt if own else None),
        percent(own.rate_drafted if own else None),
        percent(own.rate_admitted if own else None),
        number(own.tokens_per_forward if own else None),
        number(speed.tokens_per_second if speed else None, 1),
        number(1000 * speed.first.p50 if speed and speed.first else None, 0),
        number(1000 * speed.each.p50 if speed and speed.each else None, 1),
        "-" if quality is None else f"{quality.right} of {quality.graded}",
        f"{arm.truncated} of {arm.turns}",
        str(arm.failed),
    ]


def pair_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """One row a benchmark and temperature."""
    header = ["benchmark", "T", comparison.a, comparison.b, "a / b (95 %)", "wins a-b-tie",
              "equal texts", "prompts"]  # fmt: skip
    rows = []
    for pair in comparison.pairs:
        same = ", ".join(f"{i.same} of {i.of}" for i in pair.identity) or "-"
        rows.append(
            [
                pair.title,
                f"{pair.temperature:g}",
                number(pair.a),
                number(pair.b),
                number(pair.ratio, 3)
                + ("" if pair.ratio_interval is None
                   else f" ({pair.ratio_interval[0]:.3f} to {pair.ratio_interval[1]:.3f})"),
                f"{pair.wins_a}-{pair.wins_b}-{pair.ties}",
                same,
                str(pair.prompts),
            ]
        )  # fmt: skip
    return header, rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a document; bars in cells are escaped."""
    lines = [_line(header), "|" + "---|" * len(header), *(_line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 2) -> str:
    """Rounded, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in per cent, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"
