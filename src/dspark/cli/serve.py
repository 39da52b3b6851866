"""``dspark serve DRAFT --engine vllm|atom --plan``: print the launch line of another engine.

dspark's own server is started in ``dspark.cli.embedded``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from dspark.checkpoint.published import read_raw
from dspark.cli.launch import Engine, Launch, Served, launch
from dspark.doctor.predicates import provenance_of
from dspark.errors import ConfigError


def plan_serving(
    checkpoint: Path, engine: str, target: str | None, extra: list[str], *, plan: bool
) -> Launch:
    """The launch line for ``checkpoint``; ``target`` None takes the one in provenance.

    Raises:
        ConfigError: an engine or a way of serving that is not there, or a contradicting word.
        CheckpointError: no config.json.
    """
    _require_plan(engine, plan)
    draft = served_draft(checkpoint)
    provenance = provenance_of(draft.raw)
    name = target or provenance.get("target_path") or provenance.get("target")
    if not isinstance(name, str) or name.startswith("package:"):
        raise ConfigError(
            expected="a target that the engine can load: a folder or a hub id",
            found=str(name) if name else "none in the draft's provenance",
            where="dspark serve --target",
            fix="Name it: --target ORG/NAME.",
        )
    chosen: Engine = "vllm" if engine == "vllm" else "atom"
    return launch(chosen, draft, name, extra)


def served_draft(checkpoint: Path) -> Served:
    """The draft in ``checkpoint`` as launch lines and options are checked against it.

    Raises:
        CheckpointError: no config.json.
    """
    raw = read_raw(checkpoint)
    return Served(str(checkpoint.resolve()), raw, _accept_rates(checkpoint))


def _require_plan(engine: str, plan: bool) -> None:
    engines = get_args(Engine)
    if engine not in engines:
        raise ConfigError(
            expected=f"one of embedded, {', '.join(engines)}",
            found=engine,
            where="dspark serve --engine",
            fix="Name one of them.",
        )
    if not plan:
        raise ConfigError(
            expected=f"--plan with --engine {engine}: dspark prints that engine's launch line",
            found="a request to serve",
            where="dspark serve",
            fix="Add --plan and run the line it prints, or leave --engine out: dspark serves with "
            "its own engine.",
        )


def _accept_rates(checkpoint: Path) -> tuple[float, ...]:
    """Per-slot rates of the last evaluation, when training.json lies beside the weights."""
    try:
        history: Any = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
        return tuple(float(rate) for rate in history["evals"][-1]["accept_rate"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ()


def show(planned: Launch, *, as_json: bool) -> None:
    """The command on stdout; what contradicts the checkpoint on stderr."""
    if as_json:
        out = {"command": list(planned.command), "shell": planned.shell}
        typer.echo(json.dumps({**out, "warnings": list(planned.warnings)}, indent=2))
        return
    typer.echo(planned.shell)
    console = Console(stderr=True, soft_wrap=True)
    for warning in planned.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
