"""What is measured: an engine in this process or a server, and what may not differ between two."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.api import Engine
from dspark.artifacts import sha256_file
from dspark.bench.play.http import HttpPlayer
from dspark.bench.play.settings import SuiteSettings, require_server_settings
from dspark.bench.play.turn import Player
from dspark.checkpoint.published import CONFIG, read_config
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.bench_engine import EnginePlayer
from dspark.cli.origin import versions
from dspark.client import Client, Endpoint, Retry, Timeouts
from dspark.config.engine import EngineOptions
from dspark.errors import EndpointError
from dspark.pairing import target_identity

KEY_VARIABLE = "DSPARK_API_KEY"
_CACHE_DTYPE = re.compile(r'vllm:cache_config_info\{[^}]*cache_dtype="([^"]*)"')


@dataclass
class Stack:
    """A player and its fingerprint. ``context`` is the longest sequence in tokens, None unknown.

    ``count`` gives the tokens of a user turn, None where only the server could tell.
    """

    name: str
    player: Player
    fingerprint: dict[str, Any]
    draft: dict[str, Any]
    context: int | None
    count: Callable[[str], int] | None = None


def engine_stack(
    target: LoadedTarget, draft: Path | None, settings: SuiteSettings, name: str
) -> Stack:
    """Our engine on ``target``, with a draft or decoding plainly.

    Raises:
        CheckpointError, TargetError: draft and target do not fit together.
    """
    # Every question is asked several times: with cached prompts, first tokens would come too soon.
    options = EngineOptions(
        max_requests=settings.concurrency,
        prefix_cache=False,
        verification=settings.verification,
        draft_sample_method=settings.draft_sample_method,
    )
    engine = Engine(target, draft, options=options)
    context = target.max_context
    fingerprint = {
        "engine": f"dspark {__version__}",
        "versions": versions(),
        "target": target.files.source,
        **target_identity(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kv_dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "context": context,
        "verification": options.verification,
        "draft_sample_method": options.draft_sample_method,
        "truncate_draft": options.truncate_draft,
        "prefix_cache": options.prefix_cache,
    }
    described = {"kind": "none (plain decoding)"} if draft is None else draft_identity(draft)
    return Stack(
        name,
        EnginePlayer(engine, context=context),
        fingerprint,
        described,
        context,
        lambda text: len(engine.encode([{"role": "user", "content": text}])),
    )


def draft_identity(folder: Path) -> dict[str, Any]:
    """What makes a draft this draft: hashes of its weights and config, and its shape."""
    config, provenance = read_config(folder)
    files = {path.name: sha256_file(path)[1] for path in sorted(folder.glob("*.safetensors"))}
    return {
        "kind": config.flavour,
        "folder": folder.name,
        "weights_sha256": files,
        "config_sha256": sha256_file(folder / CONFIG)[1],
        "block_size": config.block_size,
        "markov_head": config.markov_head_type,
        "trained_by": provenance.get("tool"),
        "expected_acceptance": provenance.get("expected_acceptance"),
    }


@asynccontextmanager
async def server_stack(
    url: str, model: str | None, settings: SuiteSettings, name: str
) -> AsyncIterator[Stack]:
    """An OpenAI-compatible server. Its key is read from the variable ``DSPARK_API_KEY``.

    Raises:
        ConfigError: settings of our own engine.
        EndpointError: it is not there, or serves another model.
    """
    require_server_settings(settings)
    endpoint = Endpoint(url, model, os.environ.get(KEY_VARIABLE), settings.concurrency)
    retry = Retry(attempts=settings.tries, first=0.5, most=5.0)
    timeouts = Timeouts(read=settings.timeout)
    async with Client([endpoint], retry=retry, timeouts=timeouts) as client:
        info = (await client.connect())[endpoint.url]
        player = HttpPlayer(client, endpoint, one_by_one=settings.concurrency == 1)
        found = await player.counters()
        version = await _quiet(client, endpoint, "/version")
        metrics = await _quiet(client, endpoint, "/metrics")
        cache = _CACHE_DTYPE.search(metrics or "")
        fingerprint = {
            "engine": _engine(info.owner, version),
            "url": endpoint.root,
            "target": info.root or info.id,
            "model": info.id,
            "context": info.length,
            "kv_dtype": cache.group(1) if cache else None,
            "counters": None if found is None else found.source,
        }
        draft = {"kind": "the server's own", "told": _draft_told(metrics)}
        yield Stack(name, player, fingerprint, draft, info.length)


async def _quiet(client: Client, endpoint: Endpoint, path: str) -> str | None:
    try:
        return await client.get_text(endpoint, path)
    except EndpointError:
        return None


def _engine(owner: str | None, version: str | None) -> str:
    try:
        told = json.loads(version or "")
    except ValueError:
        told = None
    number = told.get("version") if isinstance(told, dict) else None
    return " ".join(part for part in (owner or "unknown", number) if part)


def _draft_told(metrics: str | None) -> str | None:
    found = re.search(r"dspark:draft_info\{([^}]*)\}", metrics or "")
    return found.group(1) if found else None
