"""The model card of an exported draft: what it is, for which target, and what was measured.

Everything on it is in config.json or in the figures handed in. What was not measured is said to be
not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.checkpoint.engines import engine_views
from dspark.checkpoint.layout import Shape, parameters, trainable_parameters
from dspark.config.architecture import DraftConfig


@dataclass(frozen=True)
class Figures:
    """Rows of ``bench/results.json`` and how they were measured (label -> text)."""

    rows: Sequence[dict[str, Any]]
    conditions: dict[str, str] = field(default_factory=dict)


def model_card(
    config: DraftConfig,
    provenance: dict[str, Any],
    shapes: dict[str, Shape],
    files: dict[str, dict[str, Any]],
    figures: Figures | None,
    *,
    name: str,
    dtype: str,
    slim: bool,
) -> str:
    """README.md of an export; ``files`` maps weight files to size and hash."""
    target = str(provenance.get("target", "unknown"))
    parts = [
        _front_matter(target),
        f"# {name}",
        f"A DSpark draft of flavour {config.flavour} ({config.architecture}) for `{target}`: it "
        f"drafts {config.block_size} tokens in one pass, which the target verifies, so that the "
        "text is the target's own.",
        _table(("", ""), _facts(config, provenance, shapes, dtype, slim)),
        "## Measured",
        *_measured(provenance, figures),
        "## Serving",
        "The same `config.json` and weights for every engine that serves this flavour:",
        _table(("engine", "how", "layer ids as it counts them"), _engines(config)),
        *_embedding(slim, provenance),
        "## Files",
        _table(
            ("file", "bytes", "sha256"),
            [(f"`{n}`", f"{f['bytes']:,}", f"`{f['sha256']}`") for n, f in files.items()],
        ),
        "`dspark inspect FOLDER --deep` recomputes them. `config.json` holds under "
        "`dspark_provenance` what the draft was trained on and how.",
        "The draft repeats weights of its target (the embedding) and learned from its output: the "
        "target's licence may bind it.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str) -> str:
    lines = ["---", "tags:", "- speculative-decoding", "- dspark"]
    # A path or a package is no model of the hub.
    if target.count("/") == 1 and not target.startswith((".", "/", "~", "package:", "modelscope:")):
        lines += [f"base_model: {target}"]
    return "\n".join([*lines, "---"])


def _facts(
    config: DraftConfig,
    provenance: dict[str, Any],
    shapes: dict[str, Shape],
    dtype: str,
    slim: bool,
) -> list[tuple[str, str]]:
    ids = ", ".join(map(str, config.target_layer_ids))
    rows = [
        ("target", f"`{provenance.get('target', 'unknown')}`"),
        ("target revision", f"`{provenance.get('target_revision') or 'not recorded'}`"),
        ("parameters", f"{parameters(shapes):,} ({trainable_parameters(shapes):,} trained)"),
        ("dtype", dtype),
        ("layers", str(config.num_hidden_layers)),
        ("cache elements a token", f"{config.row_width * config.num_hidden_layers:,}"),
        ("target layers read", f"{ids} of {config.target_num_hidden_layers}, after each layer"),
        ("block size", f"{config.block_size}, the anchor first"),
        ("mask token", str(config.mask_token_id)),
        ("Markov head", f"{config.markov_head_type}, rank {config.markov_rank}"),
        ("embedding", "left out (slim): the target's own is needed" if slim else "the target's"),
    ]
    start = provenance.get("start")
    if isinstance(start, dict) and start.get("embedding") == "random":
        rows[-1] = ("embedding", "random: this draft was never trained")
    return rows


def _measured(provenance: dict[str, Any], figures: Figures | None) -> list[str]:
    if figures is None:
        said = "Nothing was measured for this draft."
        return [
            f"{said} It is untrained: its weights are random." if "start" in provenance else said
        ]
    header = ("prompts", "T", "acceptance length", "95 %", "plain tok/s", "draft tok/s", "speed-up",
              "same text as plain")  # fmt: skip
    rows = []
    for row in figures.rows:
        low, high = row["ci95"]
        same = row["identical_to_plain"]
        speed = row["tokens_per_second"]
        rows.append((
            str(row["prompts"]),
            str(row["temperature"]),
            f"{row['acceptance_length']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{speed['plain']:.1f}",
            f"{speed['draft']:.1f}",
            f"{row['speedup']:.2f}x",
            "-" if same is None else f"{same[0]} of {same[1]}",
        ))  # fmt: skip
    told = [f"- {label}: {text}" for label, text in figures.conditions.items()]
    note = (
        "Acceptance length counts the token the target adds itself, so it runs from 1 to "
        "block size + 1. Workload prompts are of the kind it was trained for, general ones are not."
    )
    return [_table(header, rows), note, *(["\n".join(told)] if told else [])]


def _engines(config: DraftConfig) -> list[tuple[str, str, str]]:
    return [
        (view.engine, view.served, ", ".join(map(str, view.layer_ids)))
        for view in engine_views(config)
    ]


def _embedding(slim: bool, provenance: dict[str, Any]) -> list[str]:
    if not slim:
        return []
    return [
        "This export holds no `embed_tokens.weight`. Engines that share the target's embedding "
        "load it as it is; `dspark` takes the embedding from the target and checks its sha256."
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
