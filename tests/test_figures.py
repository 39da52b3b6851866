"""Figures of the documentation are those of ``benchmarks/results``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def figure_row(result: dict[str, Any]) -> str:
    """One row of ``summary.json`` as the README's table prints it."""
    low, high = result["ci95"]
    speed, same = result["tokens_per_second"], result["identical_to_plain"]
    cells = [
        result["prompts"],
        str(result["temperature"]),
        f"{result['acceptance_length']:.2f} ({low:.2f} to {high:.2f})",
        f"{speed['plain']:.1f}",
        f"{speed['draft']:.1f}",
        f"{result['speedup']:.2f}x",
        "-" if same is None else f"{same[0]} of {same[1]}",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_figures_are_those_of_the_recorded_run() -> None:
    path = ROOT / "benchmarks/results/quickstart.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert "@@" not in README, "a figure was not filled in"
    assert len(summary["results"]) == 4
    for result in summary["results"]:
        assert figure_row(result) in README
    told = " ".join(README.split())
    assert f"took {summary['seconds_total'] / 60:.1f} minutes" in told
    assert f"with {summary['machine']['cores']} cores" in told
    assert summary["machine"]["device"] in told
    assert f"at commit {summary['commit']}" in told


def scheduler_row(row: dict[str, Any]) -> str:
    """One row of ``scheduler.json`` as the page about serving prints it."""
    speed = row["tokens_per_second"]
    cells = [row["batch"], row["text"], f"{row['temperature']:g}"]
    cells += [f"{speed[name]:.0f}" for name in ("plain", "fixed", "scheduled")]
    for name in ("to_plain", "to_fixed"):
        ratio, low, high = row[name]
        cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join(map(str, cells))} |"


def test_the_table_of_schedulers_is_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/scheduler.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    assert {row["batch"] for row in found["rows"]} == {1, 8, 32}
    for row in found["rows"]:
        assert scheduler_row(row) in page
        assert row["commit"] in page


def test_what_short_answers_gave_is_what_was_measured() -> None:
    path = ROOT / "benchmarks/results/scheduler_short.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    ratios = [row["to_plain"][0] for row in rows]
    assert f"`sync` was {min(ratios):.3f} to {max(ratios):.3f} of plain" in page
    assert all(row["batch"] == 32 and row["commit"] in page for row in rows)


def against_vllm_row(title: str, arm: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """One arm of ``against_vllm.json`` as the page about vLLM prints it."""
    cells, accepted = [title], {f"{b['acceptance_length'] or 0:.2f}" for b in arm.values()}
    for batch, found in arm.items():
        speed = found["tokens_per_second"]
        gain = f" ({speed / plain[batch]['tokens_per_second']:.2f}x)" if plain else ""
        cells.append(f"{speed:.1f}{gain}")
    return f"| {' | '.join([*cells, accepted.pop() if plain else ''])}".rstrip() + " |"


def test_the_table_of_vllm_beside_our_engine_is_what_was_measured() -> None:
    path = ROOT / "benchmarks/results/against_vllm.json"
    arms = json.loads(path.read_text(encoding="utf-8"))["arms"]
    page = (ROOT / "docs/serving-vllm.md").read_text(encoding="utf-8")
    assert len(arms) == 4
    for stack, title in (("vllm", "vLLM 0.32.0"), ("ours", "our engine")):
        plain, draft = (arms[f"{stack}-{name}"]["batches"] for name in ("plain", "draft"))
        assert against_vllm_row(title, plain, None) in page
        assert against_vllm_row(f"{title} with the draft", draft, plain) in page
    assert all(f"commit {arm['commit']}" in page for arm in arms.values())
    same = {
        b["same_texts"]["without a draft"] for a in arms.values() for b in a["batches"].values()
    }
    assert same == {8}
    assert "All 8 texts are the same" in page
