"""Every way a JSON Lines file can be unusable ends in a DataError that says where."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from dspark.data.jsonl import read_json_lines
from dspark.errors import DataError


def read(path):
    return list(read_json_lines(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"\n  \n", "only blank lines"),
        (b'{"a": 1}\n{"a": \n', r"line 2.*invalid JSON"),
        (b'{"a": 1}\n\n[1]\n', r"line 3.*a JSON list"),
        (b'"text"\n', r"line 1.*a JSON str"),
        (b"null\n", r"line 1.*a JSON NoneType"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', r"line 2.*byte 0xff at column 8"),
        (b'{"a": 1} {"b": 2}\n', r"line 1.*invalid JSON"),
        (b"[" * 200_000 + b"\n", r"line 1.*invalid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", r"line 1.*invalid JSON"),
    ],
)
def test_bad_content_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_missing_file_and_folder_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="a folder"):
        read(tmp_path)


def test_unreadable_file_names_the_permission(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # root may read everything, so read as somebody else
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match="no permission"):
            read(path)
    finally:
        os.seteuid(user)


def test_damaged_and_mislabelled_archives_are_refused(tmp_path):
    packed = gzip.compress(json.dumps({"a": "x" * 5000}).encode() + b"\n")
    truncated = tmp_path / "truncated.jsonl.gz"
    truncated.write_bytes(packed[: len(packed) // 2])
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text('{"a": 1}\n')
    flipped = tmp_path / "flipped.jsonl.gz"
    flipped.write_bytes(packed[:12] + bytes(b ^ 0xFF for b in packed[12:20]) + packed[20:])
    for path in (truncated, plain, flipped):
        with pytest.raises(DataError, match=path.name):
            read(path)


def test_line_separators_inside_strings_marks_and_blank_lines_are_no_trouble(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"a": "x\u2028y\x85z"}\r\n\n{"a": "é"}'.encode())
    assert read(path) == [(1, {"a": "x\u2028y\x85z"}), (3, {"a": "é"})]


def test_gz_is_unpacked(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert read(path) == [(1, {"a": 1}), (2, {"a": 2})]
