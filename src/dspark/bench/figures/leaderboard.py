"""``docs/benchmarks.md`` from results in JSON: only what was measured, with how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.bench.figures.schema import SuiteResults
from dspark.bench.figures.tables import card_rows, detail_rows, markdown

HEAD = """# Benchmarks

Every row below was measured by `dspark bench` and is rendered from a file in `benchmarks/results/`
by `dspark leaderboard`; nothing is typed in by hand. Acceptance length is 1 + accepted / steps,
pooled over steps, with a 95 % bootstrap interval over prompts. Lengths depend on the engine, the
prompts, the sampling and the limit of tokens: compare on one stack only, best with
`dspark compare`. Which prompts a benchmark asks is in `src/dspark/bench/tasks/definitions`; how
to measure is in [measuring.md](measuring.md).
"""


def render_leaderboard(results: Mapping[str, SuiteResults]) -> str:
    """The page; ``results`` by file name. A section a file, in the order of names."""
    parts = [HEAD]
    for name, own in sorted(results.items()):
        parts.append(_section(name, own))
    if not results:
        parts.append("Nothing has been measured yet.\n")
    return "\n".join(parts)


def _section(name: str, own: SuiteResults) -> str:
    notes = list(dict.fromkeys([*own.notices, *_told(own)]))
    lines = [
        f"## {own.suite}: {own.name} on {own.stack.get('target', 'unknown')}\n",
        markdown(*card_rows(own)),
        markdown(*detail_rows(own)),
        f"`{own.made.get('command')}`, commit {own.made.get('commit')}, "
        f"{_machine(own.made.get('machine', {}))}; {own.stack.get('engine')}, "
        f"{own.stack.get('dtype', 'dtype unknown')}; file `benchmarks/results/{name}`.\n",
    ]
    if notes:
        lines.append("".join(f"- {text}\n" for text in notes))
    return "\n".join(lines)


def _told(own: SuiteResults) -> Sequence[str]:
    return [f"{a.title}, T = {a.temperature:g}: {text}" for a in own.arms for text in a.notices]


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine.get('device', 'unknown device')}, {machine.get('cores', '?')} cores"
