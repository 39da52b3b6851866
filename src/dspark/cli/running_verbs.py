"""The verbs that run a draft beside its target, or compare what came of it.

Like `dspark.cli.main`, this module imports neither torch nor transformers at its top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import serve_options as told
from dspark.cli.draft_verbs import Overrides
from dspark.errors import ConfigError

verbs = typer.Typer()


@verbs.command()
def serve(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DRAFT|RUN", help="A draft folder, or its run.")
    ],
    engine_args: told.EngineArgs = None,
    engine: told.EngineName = "embedded",
    target: told.Target = None,
    host: told.Host = told.ServeOptions.host,
    port: told.Port = told.ServeOptions.port,
    api_key: told.ApiKey = None,
    max_model_len: told.MaxModelLen = None,
    max_num_seqs: told.MaxNumSeqs = told.ServeOptions.max_num_seqs,
    max_waiting: told.MaxWaiting = told.ServeOptions.max_waiting,
    cache_gib: told.CacheGiB = told.ServeOptions.cache_gib,
    scheduler: told.SchedulerOption = None,
    speculative_config: told.SpeculativeConfig = None,
    served_model_name: told.ServedName = None,
    drain: told.Drain = told.ServeOptions.drain,
    probe: told.Probe = told.ServeOptions.probe,
    offload_memory: told.OffloadMemory = told.ServeOptions.offload_memory,
    offload_disk: told.OffloadDisk = told.ServeOptions.offload_disk,
    offload_path: told.OffloadPath = None,
    offload_fp8: told.OffloadFP8 = False,
    role: told.RoleOption = None,
    peer: told.Peer = None,
    patience: told.Patience = told.ServeOptions.patience,
    plan: told.Plan = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Serve a draft and its target: OpenAI's API, metrics, a playground."""
    if plan and checkpoint.suffix in {".yaml", ".yml"}:
        from dspark.cli.scale_plan import scale_plan, show_scale

        show_scale(scale_plan(checkpoint), as_json=as_json)
        return
    from dspark.cli.places import draft_folder

    checkpoint = draft_folder(checkpoint)
    options = told.ServeOptions(
        checkpoint, target, host, port, tuple(api_key or ()), max_model_len, max_num_seqs,
        max_waiting, cache_gib, None if scheduler is None else scheduler.value, speculative_config,
        served_model_name, drain, probe, offload_memory, offload_disk, offload_path, offload_fp8,
        None if role is None else role.value, peer, patience,
    )  # fmt: skip
    if engine == "embedded":
        _refuse_engine_args(engine_args or [])
        _serve_here(options, plan=plan, as_json=as_json)
        return
    _refuse_own_options(engine, options.for_our_engine)
    from dspark.cli.serve import serve_elsewhere

    serve_elsewhere(checkpoint, engine, target, engine_args or [], plan=plan, as_json=as_json)


def _refuse_engine_args(given: list[str]) -> None:
    if given:
        raise ConfigError(
            expected="arguments behind -- only with --engine vllm or atom",
            found=" ".join(given),
            where="dspark serve",
            fix="Add --engine vllm, or leave them out; our own engine has options of its own: "
            "`dspark serve --help`.",
        )


def _refuse_own_options(engine: str, given: Sequence[str]) -> None:
    if given:
        raise ConfigError(
            expected=f"only options that dspark has for {engine}, and {engine}'s own behind --",
            found=", ".join(given),
            where=f"dspark serve --engine {engine}",
            fix=f"Put them behind --, in {engine}'s words: dspark serve DRAFT --engine {engine} "
            "-- OPTIONS",
        )


def _serve_here(options: told.ServeOptions, *, plan: bool, as_json: bool) -> None:
    if plan:
        from dspark.cli.serve_plan import plan_embedded, show_plan

        show_plan(plan_embedded(options), as_json=as_json)
        return
    from dspark.cli.embedded import serve_embedded

    serve_embedded(options)


@verbs.command()
def route(
    servers: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers of one model and draft.")
    ],
    host: told.Host = told.ServeOptions.host,
    port: told.Port = told.ServeOptions.port,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds a request waits for a server that answers.")
    ] = 60.0,
    drain: told.Drain = told.ServeOptions.drain,
) -> None:
    """One address in front of several servers; what a dead one was asked, another answers."""
    from dspark.cli.route import serve_route

    serve_route(servers, host, port, patience, drain)


@verbs.command()
def generate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFT] [KEY=VALUE]...",
            help="A draft folder, and sampling parameters: temperature=0.7 max_new_tokens=200",
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What to answer; repeatable.")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The target; the draft's own when left out."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Answer prompts with the embedded engine and print text and acceptance."""
    folders = [Path(a) for a in arguments or [] if "=" not in a]
    overrides = [a for a in arguments or [] if "=" in a]
    if len(folders) > 1 or not prompt:
        raise ConfigError(
            expected="at least one --prompt" if not prompt else "one draft folder at most",
            found="none" if not prompt else ", ".join(map(str, folders)),
            where="dspark generate",
            fix="Write dspark generate DRAFT --prompt 'What is a draft?'; --prompt may be repeated."
            if not prompt
            else "Name one of them; settings are written as name=value.",
        )
    from dspark.cli.places import draft_folder

    draft = draft_folder(folders[0]) if folders else None
    from dspark.cli.generate import generate_text

    generate_text(draft, target, prompt, overrides, raw=raw, as_json=as_json)


@verbs.command()
def verify(
    draft: Annotated[
        Path | None, typer.Argument(metavar="[DRAFT]", help="A draft whose greedy texts to check.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The target; the draft's own when left out."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, help="JSON Lines of prompts for the greedy texts.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Texts per sampled case.")] = 100_000,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Prove that drafting does not change what comes out; fails when a bound is missed."""
    from dspark.cli.places import draft_folder

    draft = None if draft is None else draft_folder(draft)
    from dspark.cli.verify import verify as prove

    prove(draft, target, prompts, samples, as_json=as_json)


@verbs.command()
def calibrate(
    source: Annotated[
        Path, typer.Argument(metavar="RECIPE|DRAFT|RUN", help="A recipe, or a draft folder.")
    ],
    overrides: Overrides = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, help="JSON Lines of held-out prompts to answer.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The target; the draft's own when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Fit the confidence head's temperatures on held-out prompts and write calibration.json."""
    from dspark.cli.places import recipe_or_draft

    source = recipe_or_draft(source, "calibrate")
    from dspark.cli.calibrate import calibrate as run

    run(source, prompts, target, overrides or [], as_json=as_json)


@verbs.command()
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B [KEY=VALUE]...",
            help="Two draft folders, two servers' urls, or two results (.json); and settings.",
        ),
    ] = None,
    no_draft: Annotated[
        bool, typer.Option("--no-draft", help="A third arm without a draft: are texts equal?")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(help="Between servers: url of one without a draft.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="quick, seed14 or paper9.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="One benchmark; repeatable.")] = None,
    data: Annotated[
        Path | None, typer.Option(exists=True, help="Folder of benchmark files.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Another target than the drafts name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results and comparison.")] = None,
    from_table: Annotated[
        Path | None, typer.Option(exists=True, help="A published table as JSON instead of A and B.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Compare two drafts on one stack: interleaved, paired, with intervals."""
    from dspark.cli.places import drafts_in

    sides = drafts_in(arguments or (), "compare", 2, results=True)
    from dspark.cli.compare_verb import CompareOptions, run_compare

    run_compare(
        CompareOptions(
            tuple(sides), no_draft, reference, suite, tuple(task or ()), data, target,
            out, from_table, as_json,
        )
    )  # fmt: skip


@verbs.command()
def leaderboard(
    results: Annotated[
        Path, typer.Argument(metavar="[RESULTS]", help="Folder of results of suites.")
    ] = Path("benchmarks/results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/benchmarks.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the page is what it would be.")
    ] = False,
) -> None:
    """Write docs/benchmarks.md from measured results."""
    from dspark.cli.leaderboard import write_leaderboard

    if not write_leaderboard(results, out, check=check):
        raise typer.Exit(1)
