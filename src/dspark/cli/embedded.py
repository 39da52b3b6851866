"""``dspark serve DRAFT``: dspark's own server, from a draft folder to a listening port.

The port is taken first, so that a taken one costs nothing. Then everything is loaded and compared
with what the draft says of its target; a few prompts are answered to see whether the draft drafts
as it should; and only then requests are let in.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dspark import SamplingParams, __version__
from dspark.api import Engine
from dspark.checkpoint.published import read_config
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.console import Screen
from dspark.cli.doctor_target import (
    Request,
    expected_acceptance,
    held_out_prompts,
    probe_prompts,
)
from dspark.cli.naming import options_named
from dspark.cli.serve import served_draft
from dspark.cli.serve_options import NAMES, ServeOptions
from dspark.cli.speculation import engine_options, read_speculation
from dspark.decoding.request import Generation
from dspark.doctor.findings import Check
from dspark.doctor.live import check_acceptance
from dspark.errors import ConfigError, MissingDependencyError, optional_module

if TYPE_CHECKING:
    from dspark.server.handover import HandoverRole

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
PROBE_PROMPTS, PROBE_TOKENS = 8, 48
EXAMPLES = 6
SHORT = (
    "Name three colours.",
    "What is seven times eight?",
    "Write a sentence about the sea.",
    "Count from one to ten.",
)


def serve_embedded(options: ServeOptions) -> None:
    """Serve until stopped.

    Raises:
        MissingDependencyError: the extra ``server`` is not installed.
        ConfigError: options that contradict the draft, or a port that is taken.
        DSparkError: what loading may raise.
    """
    require_installed("dspark serve")
    from dspark.cli.banner import facts, show_banner, show_probe
    from dspark.server.app import About, create_app
    from dspark.server.run import Listen, serve
    from dspark.server.service import Limits, Service

    screen = Screen(Console(stderr=True))
    served = served_draft(options.draft)
    found = read_speculation(served, options.speculative_config)
    config, _ = read_config(options.draft)
    made = engine_options(options, config.block_size, found)
    link = take_port(options.host, options.port)
    with (
        options_named(NAMES),
        screen.bar("loading target and draft", None),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always", UserWarning)
        engine = Engine(
            options.target, options.draft, options=made, max_context=options.max_model_len
        )
    doubts = [str(doubt.message) for doubt in told]
    check = probe(engine, options.draft, dict(served.raw), screen) if options.probe else None
    name = options.served_model_name or engine.loaded.files.source
    role = made_role(engine, options)
    service = Service(engine, name, Limits(waiting=options.max_waiting), role)
    show_banner(facts(options, service, found), (*doubts, *found.warnings), screen.console)
    if check is not None:
        show_probe(check, screen.console)
    about = About(
        version=__version__,
        target=engine.loaded.files.source,
        draft=str(options.draft),
        block_size=made.draft_tokens or config.block_size,
        examples=examples(options.draft, service.max_length),
    )
    host, port = link.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    screen.stage("listening", f"http://{shown}:{port}  (playground at /, OpenAI's API at /v1)")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listen = Listen(options.host, port, options.drain, "warning")
    serve(create_app(service, about, options.api_keys), listen, link)


def made_role(engine: Engine, options: ServeOptions) -> HandoverRole | None:
    """What ``--role`` and ``--peer`` ask for.

    Raises:
        MissingDependencyError: a role without pyzmq.
        ConfigError: a place that cannot be listened on.
    """
    if options.role is None or options.peer is None:
        return None
    optional_module(
        "zmq",
        expected="the package pyzmq, over which pages move",
        where="dspark serve --role",
        fix="pip install 'dspark[stream]'",
    )
    from dspark.server.handover import DecodeRole, PrefillRole

    if options.role == "prefill":
        return PrefillRole(engine, options.peer)
    return DecodeRole(engine, options.peer, options.patience)


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: taken, forbidden, or no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    link = socket.socket(family, socket.SOCK_STREAM)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        link.bind((host, port))
    except OSError as error:
        link.close()
        raise ConfigError(
            expected="an address and a port that can be listened on",
            found=f"{host}:{port}: {error.strerror or error}",
            where="dspark serve --host --port",
            fix="Stop what listens there, or name another port: --port 8001",
        ) from error
    return link


def probe(engine: Engine, folder: Path, raw: dict[str, Any], screen: Screen) -> Check:
    """Answer a few prompts greedily and compare the acceptance length with the expected one."""
    request = Request(folder, (), None, None)
    own = _fitting(probe_prompts(request, engine.loaded), engine.loaded)
    # Order messages hold worked examples, which small contexts have no room for.
    prompts = (own or [engine.encode([{"role": "user", "content": t}]) for t in SHORT])[
        :PROBE_PROMPTS
    ]
    with screen.bar("probing acceptance", None):
        outputs = engine.generate(
            list(prompts), SamplingParams(max_new_tokens=PROBE_TOKENS, scheduler="fixed")
        )
    answers = [
        Generation(list(c.ids), list(c.kinds), c.finish_reason == "stop", c.acceptance)
        for output in outputs
        for c in output.completions
    ]
    return check_acceptance(expected_acceptance(request, raw), answers)


def examples(folder: Path, context: int) -> tuple[tuple[dict[str, str], ...], ...]:
    """A few conversations of the kind that the draft learnt, for the playground."""
    found = []
    for messages in held_out_prompts(folder):
        plain = [(str(m["role"]), m["content"]) for m in messages]
        # Whoever tries one wants to see an answer, not a full context.
        small = sum(len(str(text)) for _, text in plain) < 2 * context
        if small and plain[-1][0] == "user" and all(isinstance(text, str) for _, text in plain):
            found.append(tuple({"role": role, "content": text} for role, text in plain))
    return tuple(found[:EXAMPLES])


def _fitting(prompts: list[list[int]], target: LoadedTarget) -> list[list[int]]:
    return [
        ids for ids in prompts if len(ids) + PROBE_TOKENS < target.shape.max_position_embeddings
    ]


def require_installed(verb: str) -> None:
    """Raise MissingDependencyError unless the packages of a server are there."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            expected="the packages of the server",
            found=f"not installed: {', '.join(missing)}",
            where=verb,
            fix="pip install 'dspark[server]'",
        )
