"""Strict reading of JSON Lines: a bad line is named by its number, never skipped.

Lines end at ``\\n`` only (a JSON string may hold U+2028, which ``str.splitlines`` would cut), are
decoded one by one so that bad UTF-8 has a line number too, and must each hold one JSON object.
Lines of white space are ignored; a file without any row is an error. ``.gz`` is unpacked.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.config.strictjson import finite_json
from dspark.errors import DataError


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number from 1, object)``.

    Raises:
        DataError: the file is missing, unreadable, empty, damaged, not UTF-8 or not JSON Lines.
    """
    rows = 0
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows += 1
                    yield number, _parse(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, number, error) from error
    if not rows:
        raise DataError(
            expected="at least one JSON object, one a line",
            found="an empty file" if not number else "only blank lines",
            where=str(path),
            fix="Point to a JSON Lines file with rows in it.",
        )


def _unreadable(path: Path, line: int, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        found, fix = "no such file", "Correct the path; it is taken from the current folder."
    elif isinstance(error, IsADirectoryError):
        found, fix = "a folder", "Name the file inside the folder."
    elif isinstance(error, PermissionError):
        found, fix = "no permission to read it", "Grant read permission to this user."
    else:
        found, fix = f"{error} after line {line}", "Copy or download the file again."
    return DataError(expected="a readable JSON Lines file", found=found, where=str(path), fix=fix)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    # A byte order mark is what some editors put before line 1; it is no part of the JSON.
    raw = line.removeprefix(b"\xef\xbb\xbf")
    try:
        row = finite_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
        fix = "Save the file as UTF-8."
        raise DataError(expected="UTF-8 text", found=found, where=where, fix=fix) from error
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error})"
        fix = "Write one complete JSON object on each line."
        raise DataError(expected="a JSON object", found=found, where=where, fix=fix) from error
    if not isinstance(row, dict):
        raise DataError(
            expected="a JSON object",
            found=f"a JSON {type(row).__name__}",
            where=where,
            fix="Write one complete JSON object on each line.",
        )
    return row
