"""``dspark generate``: answers on the command line, with or without a draft.

Sampling parameters are given as recipes are overridden: ``temperature=0.7 stop='["\\n"]'``, a
grammar as ``grammar.kind=regex grammar.text='[0-9]+'``. One prompt is shown as it is generated;
several are decoded together and shown when all are done.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dspark.api import Engine, Prompt
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.console import Screen
from dspark.cli.draft_target import load_target_of
from dspark.config.engine import EngineOptions
from dspark.config.faults import unknown_choice
from dspark.config.load import parse_yaml
from dspark.decoding.params import Grammar, SamplingParams
from dspark.engine.answer import RequestOutput
from dspark.errors import ConfigError, DecodingError

FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))


def generate_text(
    draft: Path | None,
    target: str | None,
    prompts: list[str],
    overrides: list[str],
    *,
    raw: bool,
    as_json: bool,
) -> None:
    """Answer ``prompts`` and print text and acceptance.

    Args:
        draft: folder of a draft; None decodes plainly.
        target: instead of the one that the draft's provenance names.
        prompts: user turns, or plain text with ``raw``.
        overrides: ``name=value`` of :class:`SamplingParams`.
        as_json: one JSON object a prompt, instead of text.

    Raises:
        ConfigError: parameters that do not exist, or neither draft nor target.
        DSparkError: what loading and decoding may raise.
    """
    params = sampling_params(overrides)
    screen = Screen(Console(stderr=True))  # stdout is for answers
    options = EngineOptions(scheduler=params.scheduler or "fixed")
    engine = Engine(_target(draft, target, screen), draft, options=options)
    if params.scheduler is not None:
        screen.stage("engine", engine.banner)
    asked: list[Prompt] = [text if raw else [{"role": "user", "content": text}] for text in prompts]
    if len(asked) == 1 and params.n == 1 and not as_json:
        outputs = engine.generate(asked, params, lambda d: typer.echo(d.text, nl=False))
        typer.echo()
    else:
        outputs = engine.generate(asked, params)
    for output in outputs:
        if as_json:
            typer.echo(json.dumps(_as_json(output), ensure_ascii=False))
        elif len(outputs) > 1 or params.n > 1:
            for completion in output.completions:
                typer.echo(f"--- {output.id}/{completion.index}\n{completion.text}")
        if not as_json:
            typer.echo(_summary(output), err=True)


def sampling_params(overrides: list[str]) -> SamplingParams:
    """Parameters from ``name=value`` pairs.

    Raises:
        ConfigError: a name that does not exist, or a value outside its range.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        dotted, _, text = override.partition("=")
        name, _, inner = dotted.strip().partition(".")
        value = parse_yaml(text, f"sampling parameter {override!r}")
        if inner:
            data.setdefault(name, {})[inner] = value
        else:
            data[name] = value
    if unknown := sorted(set(data) - set(FIELDS)):
        more = "For example: temperature=0.7 top_p=0.95 max_new_tokens=200"
        raise unknown_choice(unknown[0], FIELDS, "dspark generate", more)
    try:
        if isinstance(grammar := data.get("grammar"), dict):
            data["grammar"] = Grammar(str(grammar.get("kind")), str(grammar.get("text")))  # type: ignore[arg-type]
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return SamplingParams(**values)
    except DecodingError as error:  # typed on the command line, so it is a fault of that
        raise ConfigError(
            expected=error.expected, found=error.found, where=error.where, fix=error.fix
        ) from None


def _target(draft: Path | None, target: str | None, screen: Screen) -> LoadedTarget | str:
    if draft is not None:
        return load_target_of(draft, target, screen)
    if target is None:
        raise ConfigError(
            expected="a draft folder, or --target",
            found="neither",
            where="dspark generate",
            fix="dspark generate DRAFT --prompt TEXT, or --target SOURCE for plain decoding.",
        )
    return target


def _as_json(output: RequestOutput) -> dict[str, Any]:
    acceptance = output.acceptance
    return {
        "id": output.id,
        "prompt_tokens": len(output.prompt_ids),
        "cached_tokens": output.cached_tokens,
        "acceptance": None
        if acceptance is None
        else {
            "steps": acceptance.steps,
            "drafted": acceptance.drafted,
            "admitted": acceptance.admitted,
            "accepted": acceptance.accepted,
        },
        "completions": [
            {
                "index": c.index,
                "text": c.text,
                "ids": list(c.ids),
                "finish_reason": c.finish_reason,
                "stop_reason": c.stop_reason,
                "seed": c.seed,
                "logprobs": [dataclasses.asdict(x) for x in c.logprobs],
            }
            for c in output.completions
        ],
    }


def _summary(output: RequestOutput) -> str:
    tokens = sum(len(c.ids) for c in output.completions)
    reasons = ", ".join(dict.fromkeys(c.finish_reason for c in output.completions))
    line = f"[{output.id}: {tokens} tokens, {reasons}"
    acceptance = output.acceptance
    if acceptance is not None and acceptance.steps:
        line += (
            f"; acceptance length {acceptance.acceptance_length:.2f}: "
            f"{acceptance.accepted} of {acceptance.drafted} drafted tokens accepted"
            f" ({acceptance.admitted} admitted)"
        )
    return line + "]"
