"""What the running command is: its words, its code, its libraries and its machine.

Every stage records this when it runs, because the report may be written days later, by another
version, on another machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from dspark import __version__
from dspark.artifacts import Origin
from dspark.artifacts.machine import cpu_name

DECIDING = ("torch", "transformers", "safetensors", "numpy")


def origin_of(command: str) -> Origin:
    """The origin of everything that ``command`` makes in this process."""
    return Origin(command=command, commit=marked_commit(), versions=versions(), machine=machine())


def command_line() -> str:
    """What the user typed."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def versions(packages: tuple[str, ...] = DECIDING) -> dict[str, str]:
    """Versions of dspark, Python and ``packages``, by default those that decide the figures."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"dspark": __version__, "python": platform.python_version(), **found}


def machine() -> dict[str, str | int | float]:
    """Device the figures were measured on."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu_name()
    return {"device": name, "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def marked_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Short commit of the checkout this runs from, with ``+dirty`` when tracked files differ.

    None when it is no checkout, or git is not there to ask.
    """
    found = _git(folder, "rev-parse", "--short", "HEAD")
    # Files git does not know are left out: notes and data lying around do not change the code.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not found or changed is None:
        return None
    return f"{found}+dirty" if changed else found


def _git(folder: Path, *arguments: str) -> str | None:
    """What git answers, None when it cannot."""
    asked = ["git", "-C", str(folder), *arguments]
    try:
        out = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()
