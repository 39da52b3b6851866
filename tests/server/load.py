"""Many requests at once to a server, from a process of their own; see ``load_client``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import environment
from server.serving import Served

CLIENT = Path(__file__).with_name("load_client.py")


def load(served: Served, requests: list[dict[str, Any]], clients: int) -> dict[str, Any]:
    """What the clients measured."""
    asked = {"base": served.base, "clients": clients, "requests": requests}
    done = subprocess.run(
        [sys.executable, str(CLIENT)], input=json.dumps(asked), text=True, capture_output=True,
        timeout=1800, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
