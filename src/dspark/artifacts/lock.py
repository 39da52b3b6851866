"""One process writes into a folder at a time; the next one is told who is there.

The lock is the kernel's (``fcntl.lockf``), so it ends with its process, ``kill -9`` included, and a
process that was forked off does not keep it. The lock file only says who holds it. It is removed
when the work ends; after a kill it stays and binds nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from dspark.artifacts.storage import storage_guard
from dspark.errors import BusyError

LOCK = ".dspark-lock"
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux
# Nothing can be written there, or the file system has no locks: nobody can be kept apart.
UNLOCKABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


@contextlib.contextmanager
def run_lock(root: str | Path) -> Iterator[None]:
    """Be the only process that writes stages below ``root``, a run's folder; it is made if need be.

    Raises:
        BusyError: another process is; names it.
        StorageError: disk full.
    """
    root = Path(root)
    made = not root.exists()
    try:
        with _locked(root / LOCK, root):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                root.rmdir()  # a refused run leaves nothing behind


@contextlib.contextmanager
def artifact_lock(folder: str | Path) -> Iterator[None]:
    """As :func:`run_lock`, for one artifact outside a run: its own files are all hashed, and it may
    be moved aside, so the lock lies beside it."""
    real = Path(os.path.realpath(folder))
    with _locked(real.with_name(f".{real.name}{LOCK}"), Path(folder)):
        yield


@contextlib.contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    descriptor = _take(path, folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # before the lock ends: whoever waits looks whether it is still this
            os.close(descriptor)


def _take(path: Path, folder: Path) -> int | None:
    with storage_guard(folder):
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                if error.errno in UNLOCKABLE:
                    return None
                raise
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                told = os.pread(descriptor, 1 << 16, 0)
                os.close(descriptor)
                if error.errno in UNLOCKABLE - {errno.EACCES}:
                    return None
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise
                raise _busy(folder, told) from None
            if _still(descriptor, path):
                break
            os.close(descriptor)  # its holder removed it between our opening and locking it
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_own()).encode(), 0)
    return descriptor


def writer_of(root: str | Path) -> str | None:
    """Who writes below a run's folder at this moment, in words; None where nobody does, or where
    the system cannot be asked. Asking takes no lock."""
    path = Path(root) / LOCK
    try:
        with path.open("rb") as file:
            if sys.platform == "linux":
                wanted = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                found = fcntl.fcntl(file, fcntl.F_GETLK, wanted)
                if struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK:
                    return _holder(file.read())
    except OSError:
        pass
    return None


def _still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _own() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["dspark", *sys.argv[1:]]),
    }


def _holder(told: bytes) -> str:
    try:
        raw = json.loads(told)
        return f"process {raw['pid']} on {raw['host']}, since {raw['since']}: {raw['command']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _busy(folder: Path, told: bytes) -> BusyError:
    return BusyError(
        expected="a folder that no other command is writing",
        found=_holder(told),
        where=str(folder),
        fix="Wait until it has finished, stop it, or name another output folder.",
    )
