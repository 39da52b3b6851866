"""Plots of a run as inline SVG, drawn from the results schemas and nothing else.

The report must open anywhere, for years, without a script or a network, in light and in dark, on a
telephone and on a wide screen. So each panel is its own small SVG, drawn at the width of one page
column: the page lays panels side by side or below one another and letters keep their size.
:mod:`dspark.bench.svg` turns a drawing into something a page can own.

Curves differ by line style and marker as well as by colour.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.bench.curves import Evaluation, GradShare, Training
from dspark.bench.results import Bench, BenchArm
from dspark.bench.svg import INK, SERIES, Plot, panel

_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
_MARKERS = ("o", "s", "^", "D")
_MOST_POINTS = 400


def loss_plots(training: Training) -> list[Plot]:
    """Three panels: CE, L1 and confidence BCE over optimizer steps, held-out points on top."""
    steps = [s.step for s in training.steps]
    panels = (
        ("ce", "Cross entropy (CE)", "nats"),
        ("l1", "Distance to the target (L1)", "sum |q − p|, 0 to 2"),
        ("confidence", "Confidence loss (BCE)", "nats"),
    )
    plots = []
    for index, (key, title, unit) in enumerate(panels):
        values = [float(getattr(s, key)) for s in training.steps]
        held_out = [float(getattr(e, key)) for e in training.evals]
        at = [e.step for e in training.evals]

        def draw(
            axes: Any,
            values: list[float] = values,
            held_out: list[float] = held_out,
            at: list[int] = at,
            unit: str = unit,
            colour: str = SERIES[index],
        ) -> None:
            axes.plot(*_bucketed(steps, values), color=colour, lw=0.7, alpha=0.35)
            axes.plot(*_bucketed(steps, _running_mean(values)), color=colour, label="training")
            if held_out:
                axes.plot(at, held_out, "o", mfc="none", mec=INK, label="held out")
            axes.set(xlabel="optimizer step", ylabel=unit)
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper right")

        text = (
            f"Training: {values[0]:.3f} at step {steps[0]}, {values[-1]:.3f} at step {steps[-1]}."
        )
        if held_out:
            text += f" Held out: {held_out[0]:.3f} at first, {held_out[-1]:.3f} at last."
        plots.append(panel(f"loss-{key}", title, text, draw))
    return plots


def acceptance_plots(evals: Sequence[Evaluation]) -> list[Plot]:
    """Estimated acceptance length over training: pooled, and by category where measured."""
    if not evals:
        return []
    pooled = {"full blocks": [e.tau_full for e in evals], "all blocks": [e.tau_all for e in evals]}
    steps = [e.step for e in evals]

    def draw(axes: Any) -> None:
        for index, (name, values) in enumerate(pooled.items()):
            _line(axes, index, steps, values, name)
        axes.set(xlabel="optimizer step", ylabel="estimated acceptance length")
        axes.legend(loc="lower right")

    last = evals[-1]
    text = (
        f"Full blocks: {evals[0].tau_full:.2f} at step {steps[0]}, {last.tau_full:.2f} at step "
        f"{last.step}; all blocks at last: {last.tau_all:.2f}."
    )
    plots = [panel("tau", "Acceptance length, estimated", text, draw)]
    categories = sorted({c for e in evals for c in e.by_category})

    def draw_categories(axes: Any) -> None:
        for index, name in enumerate(categories):
            points = [(e.step, e.by_category[name]) for e in evals if name in e.by_category]
            _line(axes, index, [p[0] for p in points], [p[1] for p in points], name)
        axes.set(xlabel="optimizer step", ylabel="estimated acceptance length")
        axes.legend(loc="lower right")

    if categories:
        ends = ", ".join(f"{c} {last.by_category[c]:.2f}" for c in sorted(last.by_category))
        text = f"At step {last.step}: {ends}." if ends else "Not measured at the last evaluation."
        plots.append(panel("tau-category", "The same, by category", text, draw_categories))
    return plots


def gradient_plots(training: Training) -> list[Plot]:
    """Gradient norm over steps and, where measured, the share of it each loss term brings."""
    steps = [s.step for s in training.steps]
    norms = [s.grad_norm for s in training.steps]

    def draw(axes: Any) -> None:
        axes.plot(*_bucketed(steps, norms), color=SERIES[0], lw=0.7, alpha=0.35)
        axes.plot(*_bucketed(steps, _running_mean(norms)), color=SERIES[0])
        axes.set(xlabel="optimizer step", ylabel="gradient norm before clipping")
        axes.set_ylim(bottom=0)

    text = f"{norms[0]:.2f} at step {steps[0]}, {norms[-1]:.2f} at step {steps[-1]}."
    plots = [panel("grad-norm", "Gradient norm", text, draw)]
    shares: dict[int, GradShare] = {e.step: e.grad_share for e in training.evals if e.grad_share}
    shares |= {s.step: s.grad_share for s in training.steps if s.grad_share}
    if not shares:
        return plots
    at = sorted(shares)
    terms = (("ce", "CE"), ("l1", "L1"), ("confidence", "BCE"))

    def draw_shares(axes: Any) -> None:
        for index, (key, name) in enumerate(terms):
            _line(axes, index, at, [100 * float(getattr(shares[s], key)) for s in at], name)
        axes.set(xlabel="optimizer step", ylabel="% of gradient norm", ylim=(0, 100))
        axes.legend(loc="upper right", ncols=3)

    ends = ", ".join(f"{name} {100 * getattr(shares[at[-1]], key):.0f} %" for key, name in terms)
    text = f"At step {at[-1]}: {ends}."
    return [*plots, panel("grad-share", "Gradient share of the loss terms", text, draw_shares)]


def slot_plots(real: Mapping[float, Sequence[float]], last: Evaluation | None) -> list[Plot]:
    """Per-slot bars, one panel a temperature: training's estimate beside real decoding.

    ``real`` maps temperature to unconditional acceptance. Training measures slots one at a time
    given a right prefix, so its rates are multiplied up along the block to be comparable; greedy
    agreement stands against T = 0, the overlap of distributions against T = 1.
    """
    plots = []
    for temperature, slots in sorted(real.items()):
        estimate = slot_estimate(temperature, last)
        positions = range(1, len(slots) + 1)

        def draw(
            axes: Any,
            slots: Sequence[float] = slots,
            estimate: Sequence[float] | None = estimate,
            positions: range = positions,
        ) -> None:
            shift = 0.2 if estimate else 0.0
            if estimate:
                axes.bar(
                    [p - shift for p in positions],
                    [100 * v for v in estimate],
                    width=0.38,
                    color="none",
                    edgecolor=SERIES[1],
                    hatch="////",
                    linewidth=1,
                    label="training's estimate",
                )
            axes.bar(
                [p + shift for p in positions],
                [100 * v for v in slots],
                width=0.38,
                color=SERIES[0],
                label="real decoding",
            )
            axes.set(xlabel="slot in the block", ylabel="% of steps accepted", ylim=(0, 112))
            axes.set_xticks(list(positions))
            axes.set_yticks([0, 25, 50, 75, 100])
            axes.grid(visible=False, axis="x")
            axes.legend(loc="upper right", ncols=2)

        text = "Real decoding: " + ", ".join(f"{100 * v:.0f} %" for v in slots) + "."
        if estimate:
            text += " Training's estimate: " + ", ".join(f"{100 * v:.0f} %" for v in estimate) + "."
        plots.append(panel(f"slots-{temperature:g}", f"Slots at T = {temperature:g}", text, draw))
    return plots


def slot_estimate(temperature: float, last: Evaluation | None) -> list[float] | None:
    """Training's unconditional estimate for T = 0 or 1; ``None`` where there is none."""
    if last is None or temperature not in (0, 1):
        return None
    rates = last.greedy_agreement if temperature == 0 else last.accept_rate
    return list(itertools.accumulate(rates, lambda a, b: a * b))


def prompt_plots(bench: Bench) -> list[Plot]:
    """One panel a category: every prompt a dot, sorted; line and band are the pooled interval."""
    by_category: dict[str, list[BenchArm]] = {}
    for arm in bench.arms:
        by_category.setdefault(arm.category, []).append(arm)
    highest = max((v for a in bench.arms for v in _lengths(a)), default=1.0)
    plots = []
    for category, arms in by_category.items():

        def draw(axes: Any, arms: list[BenchArm] = arms) -> None:
            for index, arm in enumerate(arms):
                colour = SERIES[index % len(SERIES)]
                values = sorted(_lengths(arm))
                if arm.ci95 is not None:
                    axes.axvspan(*arm.ci95, color=colour, alpha=0.16, lw=0)
                if arm.acceptance_length is not None:
                    axes.axvline(arm.acceptance_length, color=colour, ls=_DASHES[index % 4], lw=1.2)
                axes.plot(
                    values,
                    range(1, len(values) + 1),
                    _MARKERS[index % 4],
                    color=colour,
                    mfc=colour if index % 2 == 0 else "none",
                    label=f"T = {arm.temperature:g}",
                )
            axes.set(xlabel="acceptance length", ylabel="prompts, sorted")
            axes.set_xlim(0.9, highest + 0.3)
            axes.set_yticks([])
            axes.legend(loc="lower right")

        text = " ".join(f"T\u00a0=\u00a0{a.temperature:g}: {_told(a)}." for a in arms)
        plots.append(panel(f"prompts-{category}", f"Prompts: {category}", text, draw))
    return plots


def _lengths(arm: BenchArm) -> list[float]:
    return [p.acceptance_length for p in arm.prompts if p.acceptance_length is not None]


def _told(arm: BenchArm) -> str:
    over = f"over {arm.prompt_count} prompt{'' if arm.prompt_count == 1 else 's'}"
    if arm.acceptance_length is None:
        return f"no verify step {over}"
    interval = "" if arm.ci95 is None else f" [{arm.ci95[0]:.2f}, {arm.ci95[1]:.2f}]"
    return f"{arm.acceptance_length:.2f}{interval} {over}"


def _line(axes: Any, index: int, x: Sequence[int], y: Sequence[float], name: str) -> None:
    style = {"ls": _DASHES[index % 4], "marker": _MARKERS[index % 4]}
    every = max(1, len(x) // 10)
    axes.plot(x, y, color=SERIES[index % 4], label=name, markevery=every, **style)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the run, narrower at both ends."""
    half = len(values) // 40
    sums = list(itertools.accumulate(values, initial=0.0))
    spans = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in spans]


def _bucketed(x: Sequence[int], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means of neighbours, so that a long run does not make a page of megabytes."""
    size = -(-len(x) // _MOST_POINTS)
    parts = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    return [sum(a) / len(a) for a, _ in parts], [sum(b) / len(b) for _, b in parts]
