"""Why finished or half-finished work is not current any more, in words for the user.

A folder is moved aside when its fingerprint or its files do not fit. A person who waited an hour
for it wants to know which setting did that, so the old configuration is compared with the new one
key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.artifacts.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    read_manifest,
)
from dspark.artifacts.record import SCHEMA_VERSION, read_record
from dspark.errors import DamagedArtifactError, ForeignArtifactError

NAMED = 3  # changed settings named in full


def reason(folder: Path, wanted: Manifest) -> str:
    """Why what lies in ``folder`` is not ``wanted``; the folder holds work of dspark."""
    if not (folder / MANIFEST).exists():
        record = read_record(folder)
        if record is None or record.config is None:
            return "unfinished work of other settings"
        parents = record.parents or {}
        return f"unfinished work, {_difference(record.config, parents, wanted)}"
    try:
        found = read_manifest(folder)
        if found.fingerprint != wanted.fingerprint:
            parents = {p.kind: p.manifest_sha256 for p in found.parents}
            return _difference(found.config, parents, wanted)
        check_files(folder, found, deep=False)
    except DamagedArtifactError as error:
        name = Path(error.where).relative_to(folder)
        return f"damaged: {name}: expected {error.expected}, found {error.found}"
    except ForeignArtifactError as error:
        return f"expected {error.expected}, found {error.found}"
    return "finished before, to be made again"


def _difference(config: Mapping[str, Any], parents: Mapping[str, str], wanted: Manifest) -> str:
    keys = changed_keys(config, wanted.config)
    if keys:
        rest = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        return f"changed: {', '.join(keys[:NAMED])}{rest}"
    new = {p.kind: p.manifest_sha256 for p in wanted.parents}
    kinds = [kind for kind in new if parents.get(kind) != new[kind]]
    if kinds:
        return f"made anew since: {' and '.join(kinds)}"
    return f"not of schema version {SCHEMA_VERSION}"


def changed_keys(old: Any, new: Any, at: str = "") -> list[str]:
    """Dotted keys whose values differ, in the order of ``new``; lists of one length by index."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*new, *(key for key in old if key not in new)]
        inside = [
            changed_keys(old[key], new[key], _join(at, key))
            if key in old and key in new
            else [_join(at, key)]
            for key in keys
        ]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        inside = [
            changed_keys(a, b, _join(at, str(i)))
            for i, (a, b) in enumerate(zip(old, new, strict=True))
        ]
    else:
        inside = [] if old == new else [[at]]
    return [key for keys in inside for key in keys]


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key
