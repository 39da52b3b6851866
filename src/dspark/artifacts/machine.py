"""What the machine is called, for records that say where something was measured."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
