"""Rows of local files: JSON Lines, JSON, CSV and Parquet, or a folder of them.

A record is a dictionary and the place it was found, so that every later complaint can name file and
line. JSON Lines, CSV and Parquet are read as streams; a JSON array is read whole, because its end
says whether it is one. Files of a folder come in the order of their names.
"""

from __future__ import annotations

import csv
import gzip
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dspark.config.strictjson import finite_json
from dspark.data.jsonl import read_json_lines
from dspark.errors import DataError, MissingDependencyError

Record = tuple[str, dict[str, Any]]
ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Columns that hold a list or an object: CSV has no other way to write them than as JSON text.
_NESTED = frozenset({"messages", "conversations", "turns", "tools", "input_ids", "loss_mask"})
_BATCH_ROWS = 1024


def record_files(path: Path) -> list[Path]:
    """``path`` itself, or the files of known kinds below it, by name.

    Raises:
        DataError: nothing there, a file of another kind, or a folder without any.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _ending(p) in ENDINGS)
        if found:
            return found
        problem = "a folder without any"
    elif not path.exists():
        problem = "no such file"
    elif _ending(path) not in ENDINGS:
        problem = f"a file ending in {path.suffix or 'nothing'}"
    else:
        return [path]
    raise DataError(
        expected=f"a file, or a folder of files, ending in {', '.join(ENDINGS)} (or with .gz)",
        found=problem,
        where=str(path),
        fix="Correct the path; it is taken from the current folder.",
    )


def read_records(path: Path) -> Iterator[Record]:
    """Yield ``(place, row)`` of a file or of every file of a folder.

    Raises:
        DataError: unreadable, empty or malformed; names the line.
        MissingDependencyError: a Parquet file, and pyarrow is not installed.
    """
    for file in record_files(path):
        ending = _ending(file)
        if ending == ".parquet":
            yield from _parquet(file)
        elif ending in {".csv", ".tsv"}:
            yield from _csv(file, "\t" if ending == ".tsv" else ",")
        elif ending == ".json" and _first_byte(file) == b"[":
            yield from _json_array(file)
        else:
            for number, row in read_json_lines(file):
                yield f"{file}, line {number}", row


def _ending(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _first_byte(path: Path) -> bytes:
    try:
        with _open(path) as file:
            return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except (OSError, EOFError) as error:
        raise _damaged(path, str(error), "Copy or download the file again.") from error


def _json_array(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as file:
            rows = finite_json(file.read().decode("utf-8-sig"))
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise _damaged(
            path, f"invalid JSON ({error})", "Write one JSON array of objects."
        ) from error
    if not rows:
        raise _damaged(path, "an empty list", "Point to a file with rows in it.")
    for number, row in enumerate(rows, start=1):
        where = f"{path}, item {number}"
        if not isinstance(row, dict):
            raise _damaged(
                where, f"a JSON {type(row).__name__}", "Write one JSON array of objects."
            )
        yield where, row


def _csv(path: Path, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(1 << 27)
    number = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="")
        ) as file:
            for number, row in enumerate(csv.DictReader(file, delimiter=delimiter), start=1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise _damaged(where, "another number of cells than the header", "Quote cells.")
                yield where, {key: _cell(key, value) for key, value in row.items()}
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        fix = "Save the file as UTF-8 CSV with a header line."
        raise _damaged(path, f"{error} after row {number}", fix) from error
    if not number:
        raise _damaged(path, "no row", "Point to a file with a header and rows.")


def _cell(key: str, value: str) -> Any:
    if key in _NESTED and value[:1] in {"[", "{"}:
        try:
            return finite_json(value)
        except ValueError:
            return value
    return value


def _parquet(path: Path) -> Iterator[Record]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        broken: Any = importlib.import_module("pyarrow").ArrowException
    except ImportError as error:
        raise MissingDependencyError(
            expected="the package pyarrow, to read Parquet",
            found=str(error),
            where=str(path),
            fix="pip install 'dspark[data]'",
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, broken) as error:
        raise _damaged(path, f"{error} after row {number}", "Copy or download it again.") from error
    if not number:
        raise _damaged(path, "no row", "Point to a file with rows in it.")


def _damaged(where: object, found: str, fix: str) -> DataError:
    return DataError(expected="readable rows", found=found, where=str(where), fix=fix)
