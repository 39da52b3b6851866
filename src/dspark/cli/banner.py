"""What a server says before it serves: what was detected, what will not be used and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dspark.api import Engine
from dspark.checkpoint.published import read_config
from dspark.cli.serve_options import ServeOptions
from dspark.cli.speculation import Speculation
from dspark.doctor.findings import Check
from dspark.engine.admission import Admission
from dspark.engine.memory import bytes_per_token
from dspark.server.service import Service

LOOK = {"pass": "green", "warn": "yellow", "fail": "bold white on red", "skip": "dim"}


def facts(options: ServeOptions, service: Service, found: Speculation) -> list[tuple[str, str]]:
    """(name, text) of everything that was detected or decided."""
    engine = service.engine
    config, provenance = read_config(options.draft)
    core, target = engine.core, engine.loaded
    made = engine.core.options
    drafted = made.draft_tokens or config.block_size
    pool = core.pool
    width = bytes_per_token(core.target, core.drafter)
    precision = str(target.dtype).removeprefix("torch.")
    return [
        ("model", service.name),
        ("target", f"{target.files.source}, {target.shape.num_hidden_layers} layers, {precision} "
         f"on {target.device}" + ("" if target.config else f" ({target.adapter_reason})")),
        ("draft", f"{options.draft}, {type(config).__name__.removesuffix('DraftConfig').lower()}, "
         f"{config.num_hidden_layers} layers, block {config.block_size}, "
         f"{draft_precision(engine)}"),
        ("layer ids", f"{list(config.target_layer_ids)}, residual after each (0-based)"),
        ("trained on", str(provenance.get("target", "unknown"))),
        ("modes", f"temperature 0: greedy; above: {made.verification} verification, "
         f"{made.draft_sample_method} drafts of {drafted} tokens"),
        ("batching", f"continuous, {made.max_requests} answers, {made.max_batch_tokens} tokens a "
         "step"),
        ("scheduler", engine.banner.removeprefix("scheduler: ")),
        ("calibration", _calibration(core.admission)),
        ("cost table", "none: nothing is left out to save time" if core.admission.costs is None
         else "of this machine and pair, refined while serving"),
        ("cache", f"{pool.count * pool.page_size:,} tokens in {pool.count:,} pages "
         f"({pool.count * pool.page_size * width / 2**20:.1f} MiB), prefix cache "
         f"{'on' if pool.share else 'off'}"),
        *_outside(options, service),
        ("limits", f"context {service.max_length}, {made.max_requests} answers at once, "
         f"{service.limits.waiting} waiting, bodies of {service.limits.body_bytes:,} bytes"),
        ("grammars", "on" if _installed("llguidance") else
         "off: llguidance is not installed, JSON output and forced tool calls get a 501"),
        ("API key", "needed" if options.api_keys else "none: everybody who reaches it may use it"),
        *(("not used", text) for text in found.unused),
    ]  # fmt: skip


def _outside(options: ServeOptions, service: Service) -> list[tuple[str, str]]:
    """Where pages go that leave the cache, and which machine computes prompts."""
    rows, offload, made = [], service.engine.core.offload, service.engine.core.options
    if offload is not None:
        host, disk = offload.store.host_bytes, offload.store.disk_bytes
        places = [f"{host / 2**30:g} GiB of host memory"] if host else []
        places += [f"{disk / 2**30:g} GiB in {made.offload_path}"] if disk else []
        size = offload.layout.bytes_per_token()
        form = "fp8 (rounded)" if made.offload_fp8 else "as they are"
        rows.append(("offload", f"{', then '.join(places)}; {size:,.0f} bytes a token, {form}"))
    if options.role == "prefill":
        rows.append(("role", f"prefill: computes prompts for decode servers at {options.peer}"))
    if options.role == "decode":
        rows.append(("role", f"decode: prompts are computed by {options.peer}, or here after "
                     f"{options.patience:g} s"))  # fmt: skip
    return rows


def _calibration(admission: Admission) -> str:
    modes = admission.confidence.calibrations
    if modes:
        return ", ".join(f"{mode.rule} T={mode.temperature:g}" for mode in modes)
    if admission.options.scheduler == "fixed":
        return "not needed by this scheduler"
    return "none: dspark calibrate DRAFT makes one; an estimator learns while serving"


def draft_precision(engine: Engine) -> str:
    """Dtype of the draft's weights."""
    drafter = engine.core.drafter
    return "no draft" if drafter is None else str(drafter.dtype).removeprefix("torch.")


def show_banner(rows: Sequence[tuple[str, str]], warnings: Sequence[str], console: Console) -> None:
    """Facts, then warnings."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", min_width=12)
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    for warning in warnings:
        table.add_row(Text("warning", style="bold yellow"), Text(warning, style="yellow"))
    console.print(table)


def show_probe(check: Check, console: Console) -> None:
    """One line when acceptance is what it should be, a box that nobody overlooks when not."""
    line = f"acceptance length {check.found}"
    if check.status in {"pass", "skip"}:
        console.print(Text.assemble((f"{'probe':>12}  ", "bold"), (line, LOOK[check.status])))
        return
    text = f"{line}\n{check.cause}.\n{check.mend}"
    title = "the draft does not draft as it should" if check.status == "fail" else "probe"
    console.print(Panel(Text(text), title=title, style=LOOK[check.status], expand=False))


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
