"""The life of an artifact folder: begin, (resume,) finish, or move aside.

Whether work is still current is decided by its *fingerprint*: a hash over the kind, the schema
version, the configuration and the parents' manifests. The same fingerprint means "resume" or
"nothing to do"; another one moves the old folder aside to ``NAME.previous-N``. Nothing a user made
is deleted, and a folder that dspark did not write is refused, not moved. One process works on one
folder at a time; there is no lock.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dspark.artifacts.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    STAGE,
    FileEntry,
    Manifest,
    check_files,
    check_fingerprint,
    check_name,
    foreign,
    read_manifest,
    stage_fingerprint,
)
from dspark.artifacts.storage import (
    PARTIAL,
    atomic_json,
    sha256_file,
    storage_guard,
    sweep_partials,
    sync,
)
from dspark.errors import ArtifactError, DamagedArtifactError, ForeignArtifactError


def is_current(folder: str | Path, fingerprint: str) -> bool:
    """Whether a finished artifact with this fingerprint lies here, with all files of full size."""
    try:
        manifest = read_manifest(folder)
        check_files(Path(folder), manifest, deep=False)
    except ArtifactError:
        return False
    return manifest.fingerprint == fingerprint


def begin(folder: str | Path, fingerprint: str) -> Path:
    """Prepare a folder for a stage and return it.

    Unfinished work of the same fingerprint is kept, so that the stage can resume. Any other dspark
    work (also a finished artifact of this fingerprint: ask :func:`is_current` before) is moved
    aside to ``NAME.previous-N``.

    Raises:
        ForeignArtifactError: the folder holds files that dspark did not write.
        StorageError: not writable.
    """
    folder = Path(folder)
    # A link to another disk stays where it is: what it points to is moved aside.
    real = Path(os.path.realpath(folder))
    with storage_guard(folder):
        if not _resumes(real, fingerprint) and _entries(real):
            _refuse_unknown(real)
            _move_aside(real)
        real.mkdir(parents=True, exist_ok=True)
        sweep_partials(real)
    record = {"tool": "dspark", "schema_version": SCHEMA_VERSION, "fingerprint": fingerprint}
    atomic_json(real / STAGE, record)
    return folder


def finish(folder: str | Path, manifest: Manifest) -> Manifest:
    """Hash and fsync every file below ``folder``, then write the manifest: the artifact exists.

    Returns the manifest with ``files`` filled in.

    Raises:
        ForeignArtifactError: the folder was begun for another fingerprint, or holds a link out of
            it or something that is no plain file.
        StorageError: disk full; the stage stays unfinished and can be run again.
    """
    folder = Path(folder)
    begun = stage_fingerprint(folder)
    if begun != manifest.fingerprint:
        raise ForeignArtifactError(
            expected=f"a folder begun for fingerprint {manifest.fingerprint[:12]}",
            found=f"one begun for {(begun or 'nothing')[:12]}",
            where=str(folder),
            fix="Run the stage again from its start.",
        )
    check_fingerprint(folder, manifest)
    files: dict[str, FileEntry] = {}
    with storage_guard(folder):
        sweep_partials(folder)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                sync(path)
            elif name not in {MANIFEST, STAGE}:
                check_name(folder, name)
                files[name] = _record(path)
        complete = manifest.model_copy(update={"files": files})
        atomic_json(folder / MANIFEST, complete.model_dump(mode="json"))
        (folder / STAGE).unlink(missing_ok=True)
    return complete


def _record(path: Path) -> FileEntry:
    if not path.is_file():
        raise foreign(path, "plain files only", "something else")
    sync(path)
    size, digest = sha256_file(path)
    return FileEntry(bytes=size, sha256=digest)


def _resumes(folder: Path, fingerprint: str) -> bool:
    return not (folder / MANIFEST).exists() and stage_fingerprint(folder) == fingerprint


def _entries(folder: Path) -> list[Path]:
    """What would be lost if the folder were taken over; temporary files do not count."""
    if not folder.exists():
        return []
    return [p for p in folder.iterdir() if not p.match(PARTIAL)] if folder.is_dir() else [folder]


def _refuse_unknown(folder: Path) -> None:
    """Only our own work is moved aside; a user's folder named by mistake is left alone."""
    if stage_fingerprint(folder) is not None:
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


def _move_aside(folder: Path) -> None:
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.previous-{number}")):
        number += 1
    os.rename(folder, aside)
