"""Artifact folders: the doors between stages.

An artifact is a folder of files plus ``manifest.json``, which is written last and atomically. So
there are only three states on disk, whatever killed the process: no artifact, an unfinished stage
(``stage.json`` says which; the stage may resume), or a finished artifact whose every file has a
recorded size and hash. Readers go through :func:`read_manifest` or :func:`verify` and never see
the middle one.

A stage reads like this::

    parents = [parent_of(answers, "answers", folder)]
    manifest = new_manifest("states", config, parents)
    if not is_current(folder, manifest.fingerprint):
        begin(folder, manifest.fingerprint)
        ...  # atomic_write the files, skipping those that are there already
        finish(folder, manifest.model_copy(update={"counts": {"records": n}}))

``storage`` writes whole files, ``manifest`` reads and checks, ``stage`` is the life of a folder.
"""

from dspark.artifacts.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    STAGE,
    FileEntry,
    Kind,
    Manifest,
    Parent,
    fingerprint,
    lineage,
    new_manifest,
    parent_of,
    read_manifest,
    verify,
)
from dspark.artifacts.stage import begin, finish, is_current
from dspark.artifacts.storage import atomic_json, atomic_write, sha256_file, storage_guard

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "STAGE",
    "FileEntry",
    "Kind",
    "Manifest",
    "Parent",
    "atomic_json",
    "atomic_write",
    "begin",
    "fingerprint",
    "finish",
    "is_current",
    "lineage",
    "new_manifest",
    "parent_of",
    "read_manifest",
    "sha256_file",
    "storage_guard",
    "verify",
]
