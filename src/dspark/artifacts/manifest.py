"""The manifest: what one artifact is, which files belong to it and what it was made from.

Reading is where a damaged, foreign or hostile folder is told from a sound one. The order of checks
decides which error the user sees: absent, another program's, another schema's, another kind's,
unreadable, contradicting itself, leaving its folder; only then sizes and hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, ValidationError

from dspark import __version__
from dspark.artifacts.made import Made
from dspark.artifacts.record import SCHEMA_VERSION, read_record
from dspark.artifacts.storage import sha256_file
from dspark.config.architecture import Frozen
from dspark.errors import (
    ArtifactError,
    DamagedArtifactError,
    ForeignArtifactError,
    MissingArtifactError,
)

MANIFEST = "manifest.json"

Kind = Literal["prompts", "answers", "states", "draft", "bench"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(Frozen):
    """Size in bytes and hash of one file."""

    bytes: NonNegativeInt
    sha256: Sha256


class Parent(Frozen):
    """An artifact this one was made from; ``path`` is relative to the artifact's folder."""

    kind: Kind
    path: str
    manifest_sha256: Sha256


class Manifest(Frozen):
    """What one artifact is. ``files`` maps names relative to the folder, with ``/``.

    ``made`` is null in artifacts that were not made by a stage of the command line.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    tool: Literal["dspark"] = "dspark"
    tool_version: str = __version__
    created: str
    config: dict[str, Any]
    fingerprint: Sha256
    parents: tuple[Parent, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)
    notes: dict[str, Any] = Field(default_factory=dict)
    made: Made | None = None
    files: dict[str, FileEntry] = Field(default_factory=dict)


def made_from(manifest: Manifest, parent: Path) -> bool:
    """Whether ``manifest`` names the artifact in folder ``parent``, as it is now, as a parent.

    Raises:
        OSError: no manifest there.
    """
    return sha256_file(parent / MANIFEST)[1] in {p.manifest_sha256 for p in manifest.parents}


def fingerprint(kind: Kind, config: dict[str, Any], parents: Sequence[Parent] = ()) -> str:
    """sha256 (hex) of everything that decides an artifact's content. Paths do not count."""
    what = {
        "kind": kind,
        "schema_version": SCHEMA_VERSION,
        "config": config,
        "parents": [[p.kind, p.manifest_sha256] for p in parents],
    }
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parent_of(folder: str | Path, kind: Kind, child: str | Path) -> Parent:
    """A finished artifact as parent of the one in ``child``. Raises as :func:`verify`.

    Sizes are checked, hashes are not: building on a truncated parent must fail at once.
    """
    verify(folder, kind)
    # Real paths, since either folder may be a link to another disk.
    path = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(child)))
    digest = sha256_file(Path(folder) / MANIFEST)[1]
    return Parent(kind=kind, path=path.as_posix(), manifest_sha256=digest)


def new_manifest(
    kind: Kind,
    config: dict[str, Any],
    parents: Sequence[Parent] = (),
    *,
    counts: dict[str, int] | None = None,
    notes: dict[str, Any] | None = None,
) -> Manifest:
    """A manifest ready for :func:`dspark.artifacts.finish`, which fills in ``files``."""
    return Manifest(
        kind=kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config,
        fingerprint=fingerprint(kind, config, parents),
        parents=tuple(parents),
        counts=counts or {},
        notes=notes or {},
    )


def read_manifest(folder: str | Path, kind: Kind | None = None) -> Manifest:
    """The manifest of a finished artifact of ``kind`` (``None``: of any kind).

    Raises:
        MissingArtifactError: nothing there, or a stage that was interrupted.
        ForeignArtifactError: another program, kind or schema version, or names leaving the folder.
        DamagedArtifactError: a manifest that cannot be read or contradicts itself.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing(folder, kind) from error
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, "a readable manifest", str(error)) from error
    _check_origin(path, raw, kind)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(key) for key in first["loc"])
        raise damaged(path, "a complete manifest", f"{at}: {first['msg']}") from error
    check_fingerprint(folder, manifest)
    for name in manifest.files:
        check_name(folder, name)
    return manifest


def verify(folder: str | Path, kind: Kind | None = None, *, deep: bool = False) -> Manifest:
    """Check that every file is there in full size and, with ``deep``, has its recorded hash.

    Raises:
        DamagedArtifactError: names the first bad file. Else as :func:`read_manifest`.
    """
    manifest = read_manifest(folder, kind)
    check_files(Path(folder), manifest, deep=deep)
    return manifest


def lineage(folder: str | Path) -> list[tuple[Path, Manifest | ArtifactError]]:
    """The artifact and all its ancestors, nearest first.

    An ancestor that was moved, deleted, damaged or replaced appears with the error that says so
    instead of its manifest. Only ``folder`` itself must be sound (raises as
    :func:`read_manifest`).
    """
    start = Path(os.path.realpath(folder))
    found: list[tuple[Path, Manifest | ArtifactError]] = [(Path(folder), read_manifest(start))]
    queue = [(start, parent) for parent in read_manifest(start).parents]
    seen = {start}
    while queue:
        child, parent = queue.pop(0)
        place = Path(os.path.realpath(child / parent.path))
        if place in seen:
            continue
        seen.add(place)
        try:
            manifest = read_manifest(place, parent.kind)
            if sha256_file(place / MANIFEST)[1] != parent.manifest_sha256:
                raise ForeignArtifactError(
                    expected=f"the {parent.kind} that {child} was made from",
                    found="another one, made later",
                    where=str(place),
                    fix="Look for the old one in a .previous-N folder beside it.",
                )
        except ArtifactError as error:
            found.append((place, error))
        else:
            found.append((place, manifest))
            queue += [(place, above) for above in manifest.parents]
    return found


def _check_origin(path: Path, raw: Any, kind: Kind | None) -> None:
    """Program, schema version and kind, before the rest of the manifest means anything."""
    if not isinstance(raw, dict) or raw.get("tool") != "dspark":
        raise foreign(path, "a manifest written by dspark", "another program's file")
    if raw.get("schema_version") != SCHEMA_VERSION:
        found = f"version {raw.get('schema_version')!r}"
        raise foreign(path, f"schema version {SCHEMA_VERSION}", found)
    if kind is not None and raw.get("kind") != kind:
        raise foreign(path, f"an artifact of kind {kind}", f"kind {raw.get('kind')!r}")


def check_fingerprint(folder: Path, manifest: Manifest) -> None:
    own = fingerprint(manifest.kind, manifest.config, manifest.parents)
    if own != manifest.fingerprint:
        expected = f"fingerprint {own[:12]}, which its config and parents give"
        raise damaged(folder / MANIFEST, expected, manifest.fingerprint[:12])


def check_name(folder: Path, name: str) -> None:
    """Refuse a file name that leaves the folder, by itself or through a link."""
    pure = PurePosixPath(name)
    plain = bool(pure.parts) and str(pure) == name and not {"\\", "\0"} & set(name)
    if plain and not pure.is_absolute() and ".." not in pure.parts:
        root = os.path.realpath(folder)
        if os.path.realpath(folder / name).startswith(os.path.join(root, "")):
            return
    raise foreign(folder / MANIFEST, "file names that stay inside the folder", repr(name))


def check_files(folder: Path, manifest: Manifest, *, deep: bool) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            info = path.stat()
            # Opening a pipe would wait for ever, so nothing but a plain file is read.
            if not stat.S_ISREG(info.st_mode):
                raise damaged(path, "a plain file", "something else")
            if info.st_size != entry.bytes:
                raise damaged(path, f"{entry.bytes} bytes", f"{info.st_size} bytes")
            if deep and (found := sha256_file(path)[1]) != entry.sha256:
                raise damaged(path, f"sha256 {entry.sha256}", found)
        except OSError as error:
            found = error.strerror or str(error)
            raise damaged(path, f"a file of {entry.bytes} bytes", found) from error


def missing(folder: Path, kind: Kind | None) -> MissingArtifactError:
    begun = read_record(folder) is not None
    return MissingArtifactError(
        expected=f"finished {kind or 'work'}",
        found="a stage that was interrupted before it finished" if begun else "no manifest",
        where=str(folder),
        fix="Run the same stage again: it resumes." if begun else "Run the stage that makes it.",
    )


def damaged(path: Path, expected: str, found: str) -> DamagedArtifactError:
    fix = "Restore the file, or move the folder away and run its stage again."
    return DamagedArtifactError(expected=expected, found=found, where=str(path), fix=fix)


def foreign(path: Path, expected: str, found: str) -> ForeignArtifactError:
    fix = "Point to the right folder, or run its stage again with this version."
    return ForeignArtifactError(expected=expected, found=found, where=str(path), fix=fix)
