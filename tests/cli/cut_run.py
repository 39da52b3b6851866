"""A process that forks real dspark commands, so that many can be cut without importing torch anew.

Run as a program it reads one JSON request a line (``Request``), forks, and prints the child's pid
and later its exit status. A child is the whole command: its signals, its exits and its files are
real. ``pause`` makes it stand still in a named place until somebody stops it; ``Cutter`` is the
test's end of the wire.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import environment

# name of the place -> (module, class or none, function); the pause comes before the call.
PLACES: dict[str, tuple[str, str | None, str]] = {
    "prompts": ("dspark.data.prompts", None, "_write_shards"),
    "answers": ("dspark.engine.generate", None, "GenerationResult"),
    "states": ("dspark.hidden.disk", "DiskStore", "put"),
    "draft": ("dspark.training.trainer", "Trainer", "_step"),
    "bench": ("dspark.bench.local", "LocalBench", "_decode"),
    "sealing": ("dspark.artifacts.stage", None, "sha256_file"),
    "sealed": ("dspark.artifacts.stage", None, "_remove_working"),
    "report": ("dspark.cli.report", None, "write_report"),
}


def install(counts: dict[str, int], pause: tuple[str, int] | None, reached: Path) -> None:
    """Count calls of every place; stand still before call ``pause[1]`` (from 1) of ``pause[0]``."""
    import importlib

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if pause == (name, counts[name] + 1):
                reached.write_text(json.dumps(counts))
                while True:
                    time.sleep(0.01)
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    for name, (module, owner, function) in PLACES.items():
        place = importlib.import_module(module)
        holder = getattr(place, owner) if owner else place
        counts[name] = 0
        setattr(holder, function, counting(name, getattr(holder, function)))


def child(request: dict[str, Any]) -> int:
    """The command, with its output in a file; the exit status as a shell would see it."""
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # A shell that runs the tests in the background has Ctrl-C ignored; a command must hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from dspark.cli.main import entry

    sys.argv = ["dspark", *request["arguments"]]
    counts: dict[str, int] = {}
    install(counts, tuple(request["pause"]) if request["pause"] else None, Path(request["reached"]))
    code = 1
    try:
        entry(request["arguments"])
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        Path(request["counts"]).write_text(json.dumps(counts))
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def serve() -> None:
    import torch
    import transformers  # noqa: F401
    from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: F401

    import dspark.cli.pipeline  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(json.loads(line))
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Cutter:
    """Starts commands in ``folder``'s stead and stops them where a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**environment(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def close(self) -> None:
        """End the server and whatever stands still in a failed test."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()

    def _line(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def run(
        self, *arguments: str, at: tuple[str, int] | None = None, number: int | None = None
    ) -> tuple[int, str, dict[str, int]]:
        """Exit status, output and calls of a command; with ``at``, ``number`` is sent there."""
        files = {name: self.folder / name for name in ("out", "reached", "counts")}
        for path in files.values():
            path.unlink(missing_ok=True)
        request = {"arguments": arguments, "pause": at, **{k: str(v) for k, v in files.items()}}
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        pid = self._line()
        if at is not None:
            deadline = time.monotonic() + 120
            while not files["reached"].exists() or not files["reached"].read_text():
                if files["counts"].exists() or time.monotonic() > deadline:
                    raise AssertionError(f"never came to {at}: {files['out'].read_text()}")
                time.sleep(0.005)
            assert number is not None
            os.kill(pid, number)
        code = self._line()
        told = files["reached"] if at else files["counts"]
        return code, files["out"].read_text(), json.loads(told.read_text())


if __name__ == "__main__":
    serve()
