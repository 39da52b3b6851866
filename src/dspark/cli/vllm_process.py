"""vLLM as a process beside this one: where its interpreter is, and what it is started with.

vLLM pins its own torch and transformers, so it lives in an environment of its own, which
``make vllm`` creates; dspark is installed there too, as its plugin. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dspark.errors import ConfigError, EngineProcessError

VARIABLE = "DSPARK_VLLM_PYTHON"
BESIDE = Path(".venv-vllm") / "bin" / "python"
_PROBE = """
import json
from importlib.metadata import entry_points
from vllm.platforms import current_platform
from dspark.vllm_plugin import KNOWN_VERSIONS, vllm_version
plugins = [e.name for e in entry_points(group="vllm.general_plugins")]
print(json.dumps({"version": vllm_version(), "cpu": bool(current_platform.is_cpu()),
                  "known": vllm_version() in KNOWN_VERSIONS, "plugin": "dspark" in plugins}))
"""


@dataclass(frozen=True)
class VllmFound:
    """An interpreter with vLLM and dspark in it. ``known``: its internals are the ones dspark was
    tested with; ``cpu``: it runs on a CPU, where drafts need dspark's plugin."""

    python: str
    version: str
    cpu: bool
    known: bool
    plugin: bool


def vllm_python() -> str:
    """The interpreter of vLLM's environment; not started.

    Raises:
        ConfigError: there is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise _absent(f"{VARIABLE} names {named}, which cannot be run")
        return named
    if os.access(BESIDE, os.X_OK):
        return str(BESIDE.absolute())
    raise _absent(f"no {BESIDE} in this folder, and {VARIABLE} is not set")


def find_vllm(python: str | None = None) -> VllmFound:
    """Ask that interpreter what it has (about ten seconds).

    Raises:
        ConfigError: it has no vLLM, or no dspark.
    """
    python = python or vllm_python()
    quiet = {**vllm_environment(), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [python, "-c", _PROBE], capture_output=True, text=True, env=quiet, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise _absent(f"{python}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return VllmFound(python, **json.loads(lines[-1]))


def vllm_environment() -> dict[str, str]:
    """This process's variables, with what vLLM needs on a small CPU unless it is set already."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    defaults = {
        "OMP_NUM_THREADS": threads,
        # Binding to cores stalls whoever shares them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**defaults, **os.environ}


def run_module(
    module: str, arguments: Sequence[str], on_line: Callable[[dict[str, int]], None]
) -> None:
    """Run ``python -m module`` in vLLM's environment; lines of JSON on its stdout are passed on.

    Raises:
        ConfigError: no such environment.
        EngineProcessError: it failed; says its last words.
    """
    python = vllm_python()
    command = [python, "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=vllm_environment(),
    )
    last: deque[str] = deque(maxlen=12)
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: last.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):
                on_line(json.loads(line))
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    reader.join(timeout=5)
    if code:
        raise EngineProcessError(
            expected=f"{module} to finish in {python}",
            found=f"exit code {code}: {''.join(last).strip() or 'no word'}",
            where="vLLM's process",
            fix="Its last words are above; capture.engine embedded does without vLLM.",
        )


def _absent(found: str) -> ConfigError:
    return ConfigError(
        expected="an environment with vLLM and dspark in it",
        found=found,
        where="vLLM",
        fix=f"Run `make vllm`, or name an interpreter that can import both: {VARIABLE}=PYTHON.",
    )


def exec_vllm(found: VllmFound, arguments: Sequence[str]) -> NoReturn:
    """Become ``vllm ARGUMENTS`` of that environment."""
    _become(found.python, "vllm.entrypoints.cli.main", arguments, {"VLLM_LOGGING_LEVEL": "INFO"})


def exec_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become ``python -m module`` in vLLM's environment: signals and exit status are its own.

    Raises:
        ConfigError: no such environment.
    """
    _become(vllm_python(), module, arguments, {})


def _become(
    python: str, module: str, arguments: Sequence[str], variables: dict[str, str]
) -> NoReturn:
    sys.stdout.flush()
    environment = {**vllm_environment(), **variables}
    os.execve(python, [python, "-m", module, *arguments], environment)
