"""Files of every kind give the same rows with their places, or say what is wrong with them."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json

import pytest

from dspark.data.records import read_records
from dspark.errors import DataError, MissingDependencyError

ROWS = [{"prompt": "one"}, {"prompt": 'two "quoted",\nlines'}, {"prompt": "drei ü"}]
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows=ROWS):
    name = path.name
    if name.endswith(".jsonl") or name == "lines.json":
        path.write_text(lines(rows))
    elif name.endswith(".json"):
        path.write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines(rows).encode()))
    elif name.endswith(".json.gz"):
        path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            delimiter = "\t" if name.endswith(".tsv") else ","
            writer = csv.DictWriter(file, ["prompt"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


NAMES = ("a.jsonl", "a.json", "lines.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.json.gz")


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = write(tmp_path / name)
    found = list(read_records(path))
    assert [row for _, row in found] == ROWS
    assert all(str(path) in where for where, _ in found)


def test_a_folder_is_read_by_name_and_other_files_are_passed_over(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "c.jsonl", [{"prompt": "3"}])
    write(tmp_path / "b" / "x.csv", [{"prompt": "2"}])
    write(tmp_path / "a.json", [{"prompt": "1"}])
    (tmp_path / "README.md").write_text("not data")
    assert [row["prompt"] for _, row in read_records(tmp_path)] == ["1", "2", "3"]


def test_nested_csv_cells_are_json(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["messages", "note"], [json.dumps([{"role": "user"}]), "[1]"]])
    assert [r for _, r in read_records(path)] == [{"messages": [{"role": "user"}], "note": "[1]"}]


@pytest.mark.skipif(not HAS_ARROW, reason="pyarrow is not installed")
def test_parquet_rows_come_with_nested_columns(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = list(read_records(tmp_path / "a.parquet"))
    assert [row for _, row in found] == rows
    assert found[-1][0].endswith("row 2500")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="readable rows"):
        list(read_records(tmp_path / "a.parquet"))


@pytest.mark.skipif(HAS_ARROW, reason="pyarrow is installed")
def test_parquet_without_pyarrow_names_the_extra(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependencyError, match=r"dspark\[data\]"):
        list(read_records(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"x", "ending in .txt"),
        ("a.json", b"[{]", "invalid JSON"),
        ("a.json", b"[]", "an empty list"),
        ("a.json", b"[1]", "item 1"),
        ("a.json", b"", "an empty file"),
        ("a.jsonl", b"{}\n[", "line 2"),
        ("a.csv", b"prompt\n", "no row"),
        ("a.csv", b"prompt\na,b\n", "number of cells"),
        ("a.csv", b"prompt\n\xff\n", "after row 0"),
        ("a.jsonl.gz", b"{}", "gzip"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_records(tmp_path / name))
    assert says in str(caught.value)
    assert name in caught.value.where


def test_nothing_there_and_a_folder_without_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_records(tmp_path / "absent"))
    with pytest.raises(DataError, match="a folder without any"):
        list(read_records(tmp_path))
