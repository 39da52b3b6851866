"""The life of an artifact folder: begin, (resume,) complete, finish, or move aside.

Whether work is still current is decided by its *fingerprint*: a hash over the kind, the schema
version, the configuration and the parents' manifests. The same fingerprint means "resume" or
"nothing to do"; another one moves the old folder aside to ``NAME.previous-N``. Nothing a user made
is deleted, and a folder that dspark did not write is refused, not moved. One process works on one
folder at a time (``dspark.artifacts.lock``).

Hashing gigabytes takes a while, so a stage says that its work is *complete* before it is sealed:
killed in between, it is sealed the next time and nothing is done again. Working files (a training
state, answers kept line by line) live until the manifest is there; if even their removal is cut
short, the next look at the finished artifact removes them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dspark.artifacts.changes import reason
from dspark.artifacts.made import Stopwatch, killed, made_of
from dspark.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_files,
    check_fingerprint,
    check_name,
    foreign,
    read_manifest,
)
from dspark.artifacts.record import STAGE, Done, StageRecord, read_record, write_record
from dspark.artifacts.storage import (
    PARTIAL,
    atomic_json,
    sha256_file,
    storage_guard,
    sweep_partials,
    sync,
)
from dspark.errors import (
    ArtifactError,
    DamagedArtifactError,
    ForeignArtifactError,
    StorageError,
)

OnMove = Callable[[Path, str], None]
Outlook = Literal["finished", "resumed", "anew", "new"]


def is_current(folder: str | Path, fingerprint: str) -> bool:
    """Whether a finished artifact with this fingerprint lies here, with all files of full size.

    Working files that a process killed behind its manifest left are removed on the way.
    """
    folder = Path(folder)
    manifest = _whole(folder, fingerprint)
    if manifest is None:
        return False
    record = read_record(folder)
    if record is not None and record.fingerprint == fingerprint:
        # A finished run on a disk we may not write to is as good with its leftovers as without.
        with contextlib.suppress(OSError):
            _remove_working(folder, record, manifest)
    return True


def outlook(folder: str | Path, wanted: Manifest) -> tuple[Outlook, str]:
    """What the stage that makes ``wanted`` would find here, and for old work the reason why it is
    not current; nothing is changed.

    Raises:
        ForeignArtifactError: the folder holds files that dspark did not write.
    """
    real = Path(os.path.realpath(folder))
    if _whole(real, wanted.fingerprint) is not None:
        return "finished", ""
    if _resumes(real, wanted.fingerprint):
        return "resumed", ""
    if not _entries(real):
        return "new", ""
    _refuse_unknown(real)
    return "anew", reason(real, wanted)


def begin(
    folder: str | Path, manifest: Manifest, on_move: OnMove = lambda _aside, _reason: None
) -> Path:
    """Prepare a folder for the stage that will write ``manifest``, and return it.

    Unfinished work of the same fingerprint is kept, so that the stage can resume. Any other dspark
    work (also a finished artifact of this fingerprint: ask :func:`is_current` before) is moved
    aside to ``NAME.previous-N``, and ``on_move`` gets that folder and the reason in words.

    Raises:
        ForeignArtifactError: the folder holds files that dspark did not write.
        StorageError: not writable.
    """
    folder = Path(folder)
    # A link to another disk stays where it is: what it points to is moved aside.
    real = Path(os.path.realpath(folder))
    record = StageRecord(
        fingerprint=manifest.fingerprint,
        config=manifest.config,
        parents={p.kind: p.manifest_sha256 for p in manifest.parents},
    )
    with storage_guard(folder):
        if _resumes(real, manifest.fingerprint):
            record = _after_a_kill(real, record)
        elif _entries(real):
            _refuse_unknown(real)
            why = reason(real, manifest)
            on_move(_move_aside(real), why)
        real.mkdir(parents=True, exist_ok=True)
        sweep_partials(real)
    write_record(real, record)
    return folder


@contextlib.contextmanager
def attempt(folder: str | Path, watch: Stopwatch) -> Iterator[None]:
    """Record one try at a begun stage in ``stage.json``, also how long it was when it fails."""
    folder = Path(folder)
    record = _begun(folder)
    opened = (*record.attempts, watch.attempt("open"))
    write_record(folder, record.model_copy(update={"attempts": opened}))
    try:
        yield
    finally:
        left = read_record(folder)
        if left is not None:
            tries = (*left.attempts[:-1], watch.attempt("interrupted"))
            # On a full disk the try stays open and counts up to its last file.
            with contextlib.suppress(StorageError):
                write_record(folder, left.model_copy(update={"attempts": tries}))


def complete(
    folder: str | Path,
    *,
    counts: dict[str, int],
    notes: dict[str, Any] | None = None,
    line: str = "",
    working: Sequence[str] = (),
) -> Done:
    """Say that all files of a begun stage are written; ``working`` names those to leave out.

    Raises:
        ForeignArtifactError: the folder was not begun, or a working file lies outside it.
        StorageError: disk full; the stage's own working files still resume it.
    """
    folder = Path(folder)
    record = _begun(folder)
    for name in working:
        check_name(folder, name)
    with storage_guard(folder):
        number, size = _totals(folder, working)
    done = Done(
        counts=counts,
        notes=notes or {},
        line=line,
        working=tuple(working),
        files=number,
        bytes=size,
    )
    write_record(folder, record.model_copy(update={"done": done}))
    return done


def completed(folder: str | Path) -> Done | None:
    """The result of a stage that was cut while it was sealed; None when work is left to do.

    Files that came, went or changed in size since then make it None: the stage runs again.
    """
    folder = Path(folder)
    done = _begun(folder).done
    if done is None:
        return None
    with storage_guard(folder):
        return done if (done.files, done.bytes) == _totals(folder, done.working) else None


def finish(folder: str | Path, manifest: Manifest, watch: Stopwatch | None = None) -> Manifest:
    """Hash and fsync every file below ``folder``, then write the manifest: the artifact exists.

    Working files named by :func:`complete` are left out and removed afterwards. With ``watch`` the
    manifest tells how the artifact was made. Returns the manifest with ``files`` filled in.

    Raises:
        ForeignArtifactError: the folder was begun for another fingerprint, or holds a link out of
            it or something that is no plain file.
        StorageError: disk full; the stage stays unfinished and can be run again.
    """
    folder = Path(folder)
    record = read_record(folder)
    if record is None or record.fingerprint != manifest.fingerprint:
        begun = record.fingerprint if record else "nothing"
        raise ForeignArtifactError(
            expected=f"a folder begun for fingerprint {manifest.fingerprint[:12]}",
            found=f"one begun for {begun[:12]}",
            where=str(folder),
            fix="Run the stage again from its start.",
        )
    check_fingerprint(folder, manifest)
    files: dict[str, FileEntry] = {}
    with storage_guard(folder):
        sweep_partials(folder)
        for name, path in _contents(folder, record.done.working if record.done else ()):
            check_name(folder, name)
            files[name] = _record(path)
        for path in sorted(folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                sync(path)
        update: dict[str, Any] = {"files": files}
        if watch is not None:
            update["made"] = made_of([*record.attempts[:-1], watch.attempt("finished")])
        whole = manifest.model_copy(update=update)
        atomic_json(folder / MANIFEST, whole.model_dump(mode="json"))
        _remove_working(folder, record, whole)
    return whole


def _whole(folder: Path, fingerprint: str) -> Manifest | None:
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, deep=False)
    except ArtifactError:
        return None
    return manifest if manifest.fingerprint == fingerprint else None


def _begun(folder: Path) -> StageRecord:
    record = read_record(folder)
    if record is None:
        raise foreign(folder, "a folder that a stage has begun", "no stage.json")
    return record


def _contents(folder: Path, leave_out: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(name, path) of everything that is no folder and belongs to the artifact, in order."""
    left = {MANIFEST, STAGE, *leave_out}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (not path.is_dir() or path.is_symlink()) and name not in left:
            yield name, path


def _totals(folder: Path, leave_out: Sequence[str]) -> tuple[int, int]:
    sizes = [
        path.lstat().st_size for _, path in _contents(folder, leave_out) if not path.match(PARTIAL)
    ]
    return len(sizes), sum(sizes)


def _remove_working(folder: Path, record: StageRecord, manifest: Manifest) -> None:
    """What only served to resume, then ``stage.json``, which names it."""
    for name in record.done.working if record.done else ():
        check_name(folder, name)
        if name not in manifest.files:
            (folder / name).unlink(missing_ok=True)
    (folder / STAGE).unlink(missing_ok=True)


def _record(path: Path) -> FileEntry:
    if not path.is_file():
        raise foreign(path, "plain files only", "something else")
    sync(path)
    size, digest = sha256_file(path)
    return FileEntry(bytes=size, sha256=digest)


def _resumes(folder: Path, fingerprint: str) -> bool:
    record = read_record(folder)
    found = record is not None and record.fingerprint == fingerprint
    return found and not (folder / MANIFEST).exists()


def _after_a_kill(folder: Path, fresh: StageRecord) -> StageRecord:
    """The record of resumed work: what was tried and done stays, a killed attempt is closed."""
    old = _begun(folder)
    tries = old.attempts
    if tries and tries[-1].ended == "open":
        signs = [p.lstat().st_mtime for p in folder.rglob("*") if p.name != STAGE]
        started = (folder / STAGE).stat().st_mtime
        tries = (*tries[:-1], killed(tries[-1], max([started, *signs])))
    return fresh.model_copy(update={"attempts": tries, "done": old.done})


def _entries(folder: Path) -> list[Path]:
    """What would be lost if the folder were taken over; temporary files do not count."""
    if not folder.exists():
        return []
    return [p for p in folder.iterdir() if not p.match(PARTIAL)] if folder.is_dir() else [folder]


def _refuse_unknown(folder: Path) -> None:
    """Only our own work is moved aside; a user's folder named by mistake is left alone."""
    if read_record(folder) is not None:
        return
    try:
        read_manifest(folder)
    except DamagedArtifactError:
        return
    except ArtifactError:
        if (folder / MANIFEST).is_file() and _is_ours(folder / MANIFEST):
            return
        raise ForeignArtifactError(
            expected="an empty folder or earlier work of dspark",
            found="files that dspark did not write",
            where=str(folder),
            fix="Name another output folder, or move these files away.",
        ) from None


def _is_ours(manifest: Path) -> bool:
    raw = json.loads(manifest.read_bytes())
    return isinstance(raw, dict) and raw.get("tool") == "dspark"


def _move_aside(folder: Path) -> Path:
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.previous-{number}")):
        number += 1
    os.rename(folder, aside)
    return aside
