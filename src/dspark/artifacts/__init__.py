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
        watch = Stopwatch(origin)
        begin(folder, manifest)
        with attempt(folder, watch):
            done = completed(folder)
            if done is None:
                ...  # atomic_write the files, skipping those that are there already
                done = complete(folder, counts={"records": n}, working=["unfinished.jsonl"])
            finish(folder, manifest.model_copy(update={"counts": done.counts}), watch)

``storage`` writes whole files, ``manifest`` reads and checks, ``stage`` is the life of a folder,
``record`` its ``stage.json``, ``lock`` keeps two writers apart, ``made`` is what is known about how
it came to be, and ``changes`` says why old work is not current.
"""

from dspark.artifacts.lock import artifact_lock, run_lock, writer_of
from dspark.artifacts.made import Attempt, Made, Origin, Stopwatch
from dspark.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    Kind,
    Manifest,
    Parent,
    fingerprint,
    lineage,
    made_from,
    new_manifest,
    parent_of,
    read_manifest,
    verify,
)
from dspark.artifacts.record import SCHEMA_VERSION, STAGE, Done
from dspark.artifacts.stage import (
    attempt,
    begin,
    complete,
    completed,
    finish,
    is_current,
    outlook,
)
from dspark.artifacts.storage import (
    atomic_file,
    atomic_folder,
    atomic_json,
    atomic_write,
    require_free,
    sha256_file,
    storage_guard,
)

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "STAGE",
    "Attempt",
    "Done",
    "FileEntry",
    "Kind",
    "Made",
    "Manifest",
    "Origin",
    "Parent",
    "Stopwatch",
    "artifact_lock",
    "atomic_file",
    "atomic_folder",
    "atomic_json",
    "atomic_write",
    "attempt",
    "begin",
    "complete",
    "completed",
    "fingerprint",
    "finish",
    "is_current",
    "lineage",
    "made_from",
    "new_manifest",
    "outlook",
    "parent_of",
    "read_manifest",
    "require_free",
    "run_lock",
    "sha256_file",
    "storage_guard",
    "verify",
    "writer_of",
]
