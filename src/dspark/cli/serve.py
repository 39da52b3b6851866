"""``dspark serve DRAFT --engine vllm|atom``: the launch line of another engine.

With ``--plan`` it is printed. Without, vLLM is started from the environment of ``make vllm``: this
process becomes its server. dspark's own server is started in ``dspark.cli.embedded``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from dspark.checkpoint.published import read_raw
from dspark.checkpoint.source import PACKAGE, find_target
from dspark.cli.launch import Engine, Launch, Served, launch
from dspark.cli.vllm_process import exec_vllm, find_vllm
from dspark.config.faults import unknown_choice
from dspark.doctor.predicates import provenance_of
from dspark.errors import ConfigError


def serve_elsewhere(
    checkpoint: Path,
    engine: str,
    target: str | None,
    extra: list[str],
    *,
    plan: bool,
    as_json: bool,
) -> None:
    """Another engine's launch line; vLLM without ``plan``: this process becomes its server.

    Raises:
        ConfigError, CheckpointError: as :func:`plan_serving` and :func:`serve_in_vllm`.
    """
    if engine == "vllm" and not plan:
        serve_in_vllm(checkpoint, target, extra)
    else:
        show(plan_serving(checkpoint, engine, target, extra, plan=plan), as_json=as_json)


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
    name = target_name(draft, target)
    if name is None or name.startswith(PACKAGE):
        raise _no_target(name or "none in the draft's provenance")
    chosen: Engine = "vllm" if engine == "vllm" else "atom"
    return launch(chosen, draft, name, extra)


def target_name(draft: Served, target: str | None) -> str | None:
    """What was asked for, or what the draft was trained for; None when neither says."""
    provenance = provenance_of(draft.raw)
    name = target or provenance.get("target_path") or provenance.get("target")
    return name if isinstance(name, str) else None


def serve_in_vllm(checkpoint: Path, target: str | None, extra: list[str]) -> None:
    """Become vLLM's server with this draft; does not return.

    A target in a GGUF, which vLLM does not read, is written out as safetensors once, beside the
    draft's folder.

    Raises:
        ConfigError: no environment with vLLM, a version that dspark's plugin does not know on a
            CPU, no target, or a contradicting word.
        CheckpointError: no config.json.
    """
    import torch

    from dspark.checkpoint.materialise import safetensors_source

    draft = served_draft(checkpoint)
    name = target_name(draft, target)
    if name is None:
        raise _no_target("none in the draft's provenance")
    found = find_vllm()
    if found.cpu and not (found.known and found.plugin):
        raise ConfigError(
            expected="a vLLM that dspark's plugin knows, with dspark installed beside it",
            found=f"vLLM {found.version}, plugin {'there' if found.plugin else 'absent'}",
            where=found.python,
            fix="Run `make vllm`.",
        )
    launch("vllm", draft, name, extra, cpu=found.cpu)  # refuses before anything is written
    if name.startswith(PACKAGE) or Path(name).exists():
        folder = checkpoint.resolve().parent / "vllm-target-float32"
        name = safetensors_source(find_target(name), folder, torch.float32)
    planned = launch("vllm", draft, name, extra, cpu=found.cpu)
    show(planned, as_json=False, err=True)
    exec_vllm(found, planned.command[1:])


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
        raise unknown_choice(engine, ("embedded", *engines), "dspark serve --engine")
    if engine == "atom" and not plan:
        raise ConfigError(
            expected=f"--plan with --engine {engine}: dspark prints that engine's launch line",
            found="a request to serve",
            where="dspark serve",
            fix="Add --plan and run the line it prints, or leave --engine out: dspark serves with "
            "its own engine.",
        )


def _no_target(found: str) -> ConfigError:
    return ConfigError(
        expected="a target that the engine can load: a folder or a hub id",
        found=found,
        where="dspark serve --target",
        fix="Name it: --target ORG/NAME.",
    )


def _accept_rates(checkpoint: Path) -> tuple[float, ...]:
    """Per-slot rates of the last evaluation, when training.json lies beside the weights."""
    try:
        history: Any = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
        return tuple(float(rate) for rate in history["evals"][-1]["accept_rate"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ()


def show(planned: Launch, *, as_json: bool, err: bool = False) -> None:
    """The command on stdout (``err``: on stderr); what contradicts the checkpoint on stderr."""
    if as_json:
        out = {"command": list(planned.command), "shell": planned.shell}
        typer.echo(json.dumps({**out, "warnings": list(planned.warnings)}, indent=2))
        return
    typer.echo(planned.shell, err=err)
    console = Console(stderr=True, soft_wrap=True)
    for warning in planned.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
