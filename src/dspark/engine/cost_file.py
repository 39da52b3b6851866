"""Cost tables between runs: one small file per machine and pair, in the user's cache folder.

A table is only as good as the machine it was measured on, so everything that decides a step's time
is part of the file's *fingerprint*: processor, threads, versions, precision, batch, target and
draft. Another fingerprint is another file; a file whose content names another one than asked for
was copied, and is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from dspark.artifacts import atomic_json
from dspark.artifacts.machine import cpu_name
from dspark.decoding.cost import CostTable
from dspark.engine.core import EngineCore
from dspark.errors import DecodingError, StorageError

VERSION = 1
Fingerprint = Mapping[str, str | int | float]


def cost_folder() -> Path:
    """``$XDG_CACHE_HOME/dspark/costs``, or the same below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dspark" / "costs"


def fingerprint(core: EngineCore, target: str, draft: str) -> Fingerprint:
    """What decides how long a step of ``core`` takes; ``target`` and ``draft`` are hashes."""
    device = core.target.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(core.target.dtype).removeprefix("torch."),
        "max_requests": core.options.max_requests,
        "target": target,
        "draft": draft,
    }


def read_costs(wanted: Fingerprint, folder: Path | None = None) -> CostTable | None:
    """The table of this fingerprint, or None.

    Raises:
        DecodingError: a file that is damaged or was measured elsewhere.
    """
    path = _path(wanted, folder)
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _bad(path, "a readable cost table", str(error)) from error
    found = raw.get("measured_on") if isinstance(raw, dict) else None
    if found != dict(wanted) or raw.get("version") != VERSION:
        differing = (
            ", ".join(k for k in wanted if found.get(k) != wanted[k])
            if isinstance(found, dict)
            else "all of it"
        )
        raise _bad(path, "costs of this machine, target and draft", f"another {differing}")
    return CostTable.from_json(raw)


def write_costs(table: CostTable, measured_on: Fingerprint, folder: Path | None = None) -> Path:
    """Save a table; returns its file.

    Raises:
        StorageError: the folder cannot be written.
    """
    path = _path(measured_on, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            expected="a cache folder that can be written",
            found=error.strerror or str(error),
            where=str(path.parent),
            fix="Set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    atomic_json(path, {"version": VERSION, "measured_on": dict(measured_on), **table.as_json()})
    return path


def _path(wanted: Fingerprint, folder: Path | None) -> Path:
    text = json.dumps(dict(wanted), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return (folder or cost_folder()) / f"{name}.json"


def _bad(path: Path, expected: str, found: str) -> DecodingError:
    return DecodingError(
        expected=expected, found=found, where=str(path), fix="Delete the file: it is made again."
    )
