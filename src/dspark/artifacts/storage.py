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
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dspark.errors import ForeignArtifactError, StorageError

PARTIAL = ".dspark-*.partial"
"""Pattern of our temporary files and folders; no finished file is ever named so."""


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


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, in pieces, that takes its name when the block ends: whole or not at all.

    Temporary file beside it, fsync, rename, fsync of the folder. On any failure, Ctrl-C included,
    the old content stays and the temporary file is removed; after ``kill -9`` a later
    :func:`sweep_partials` removes it.

    Raises:
        StorageError: disk full, not writable, or the folder does not exist.
    """
    path = Path(path)
    temporary = _partial(path)
    with storage_guard(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Write a whole file or nothing, see :func:`atomic_file`. Text is encoded as UTF-8.

    Raises:
        StorageError: disk full, not writable, or the folder does not exist.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill that takes its name when the block ends: all of its files or none.

    ``path`` must not exist, or be an empty folder. Parents are made.

    Raises:
        ForeignArtifactError: something is there already; it is left alone.
        StorageError: disk full or not writable.
    """
    path = Path(path)
    require_free(path)
    with storage_guard(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _partial(path)
        temporary.mkdir()
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)


def require_free(path: Path) -> None:
    """Refuse a name that is taken; an empty folder is not.

    Raises:
        ForeignArtifactError: something is there already.
    """
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ForeignArtifactError(
            expected="a new or empty folder",
            found="something that is there already",
            where=str(path),
            fix="Name another folder, or move this one away.",
        )


def _partial(path: Path) -> Path:
    return path.with_name(PARTIAL.replace("*", secrets.token_hex(8)))


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
    """Remove temporary files and folders that a killed process left anywhere below ``folder``."""
    for leftover in list(folder.rglob(PARTIAL)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
