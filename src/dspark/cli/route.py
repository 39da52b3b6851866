"""``dspark route URL...``: one address in front of several of dspark's servers."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from rich.console import Console

from dspark.cli.console import Screen
from dspark.cli.embedded import require_installed, take_port
from dspark.errors import ConfigError


def serve_route(urls: Sequence[str], host: str, port: int, patience: float, drain: int) -> None:
    """Route until stopped.

    Raises:
        MissingDependencyError: the extra ``server`` is not installed.
        ConfigError: an address that is none, or a port that is taken.
    """
    require_installed("dspark route")
    from dspark.server.route import create_router
    from dspark.server.run import Listen, serve

    for url in urls:
        if not re.fullmatch(r"https?://[^/]+/?", url):
            raise ConfigError(
                expected="http://HOST:PORT of a server",
                found=url,
                where="dspark route",
                fix="Leave /v1 and everything behind it out.",
            )
    link = take_port(host, port)
    bound, number = link.getsockname()[:2]
    shown = f"[{bound}]" if ":" in bound else bound
    screen = Screen(Console(stderr=True))
    screen.stage("listening", f"http://{shown}:{number}  (in front of {', '.join(urls)})")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(create_router(urls, patience), Listen(host, number, drain, "warning"), link)
