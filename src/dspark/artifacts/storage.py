"""Writing files so that a reader never sees half of one.

A killed process, a full disk or a power cut may come between any two bytes. So content goes to a
temporary file in the same folder, is flushed to the disk, and takes its name in one rename. Errors
of the system become :class:`~dspark.errors.StorageError`, which says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.errors import StorageError

PARTIAL = ".dspark-*.partial"
"""Pattern of our temporary files; no finished file is ever named so."""


@contextlib.contextmanager
def storage_guard(where: str | Path) -> Iterator[None]:
    """Turn the system's write errors (disk full, read-only, too big) into :class:`StorageError`."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        raise StorageError(
            expected="a folder that can be written to, with room left",
            found=error.strerror or str(error),
            where=str(where),
            fix="Free some space and run the same command again: finished work is kept."
            if full
            else "Give the recipe an output folder that you may write to.",
        ) from error


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Write a whole file or nothing: temporary file beside it, fsync, rename, fsync of the folder.

    Text is encoded as UTF-8. On any failure, Ctrl-C included, the old content stays and the
    temporary file is removed; after ``kill -9`` a later :func:`sweep_partials` removes it.

    Raises:
        StorageError: disk full, not writable, or the folder does not exist.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(PARTIAL.replace("*", secrets.token_hex(8)))
    with storage_guard(path):
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


def atomic_json(path: str | Path, value: Any) -> None:
    """:func:`atomic_write` of indented JSON with a final newline; NaN is a ``ValueError``."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(path, f"{text}\n")


def sha256_file(path: str | Path) -> tuple[int, str]:
    """(bytes, sha256 hex) of a file, streamed in 1 MiB pieces."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; the rename itself has happened.
        if error.errno not in {errno.EINVAL, errno.ENOSYS}:
            raise
    finally:
        os.close(descriptor)


def sweep_partials(folder: Path) -> None:
    """Remove temporary files that a killed process left anywhere below ``folder``."""
    for leftover in folder.rglob(PARTIAL):
        leftover.unlink(missing_ok=True)
