"""Runs a model's Python in a process of its own, with limits.

Limits: CPU and wall time, memory, file size, processes, an empty environment, an empty folder that
is removed. Inside the process an audit hook refuses sockets, other programs, and files outside the
folder. That stops accidents and naive mischief of a language model; it is no wall against somebody
who attacks it on purpose. Whoever measures a model they do not trust does so in a container.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10
MEMORY = 1 << 30
_FILE = 1 << 20

# Runs before the code under test. What Python itself opens to import modules may be read.
_GUARD = """
import sys, os, builtins, resource
def _install(seconds, memory, size):
    for what, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("NOFILE", 64)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + what), (limit, limit))
    home = os.path.realpath(os.getcwd())
    roots = tuple(os.path.realpath(p) for p in {sys.prefix, sys.base_prefix, *sys.path} if p)
    refused = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
               "os.fork", "pty.", "ctypes.", "os.kill", "shutil.", "os.remove", "os.rename",
               "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
               "ftplib.", "urllib.", "http.", "smtplib.", "webbrowser.")
    def hook(event, args):
        if event == "open" and isinstance(args[0], (str, bytes)):
            place = os.path.realpath(os.fsdecode(args[0]))
            inside = place == home or place.startswith(home + os.sep)
            writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            if not inside and (writes or not place.startswith(roots)):
                raise PermissionError("refused: " + place)
        elif event in ("os.listdir", "os.scandir"):
            place = os.path.realpath(os.fsdecode(args[0] or "."))
            if not place.startswith((*roots, home)):
                raise PermissionError("refused: " + place)
        elif event.startswith(refused):
            raise PermissionError("refused: " + event)
    sys.addaudithook(hook)
def _run():
    token = sys.argv.pop()
    code = compile(builtins.open("code.py", encoding="utf-8").read(), "code.py", "exec")
    exec(code, {"__name__": "__main__"})
    builtins.print("\\n" + token)
_install(*(int(sys.argv.pop()) for _ in range(3)))
del _install
_run()
"""


class Verdict(enum.Enum):
    """How it ended. ``passed``: the code ran to its end without an exception."""

    passed = "passed"
    failed = "failed"
    timeout = "timeout"


def run_python(code: str, seconds: int = SECONDS, memory: int = MEMORY) -> Verdict:
    """Run ``code`` and say whether it came to its end. What it prints is dropped.

    Args:
        seconds: of CPU time; wall time may be twice that.
        memory: of address space, in bytes.
    """
    # Known to nobody before: code that leaves early cannot claim to have passed.
    token = os.urandom(16).hex()
    with tempfile.TemporaryDirectory(prefix="dspark-grade-") as folder:
        (Path(folder) / "code.py").write_text(code, encoding="utf-8", errors="replace")
        printed = Path(folder) / "printed"
        with printed.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, token, str(_FILE), str(memory),
                 str(seconds)],
                cwd=folder,
                env={"PATH": "", "HOME": folder, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout=2 * seconds)
            except subprocess.TimeoutExpired:
                return Verdict.timeout
            finally:
                _end(process)
        ended = printed.read_bytes().decode(errors="replace").rstrip().endswith(token)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict.timeout
    return Verdict.passed if process.returncode == 0 and ended else Verdict.failed


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
