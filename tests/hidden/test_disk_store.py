"""Records at rest: bit-exact, whole or absent, and every damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from made_records import made_record
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import DamagedArtifactError, DataError, StorageError
from dspark.hidden.disk import DiskStore
from dspark.hidden.record import HiddenRecord


def bits(value: object) -> object:
    """Comparable down to the bit (NaN included) for tensors, the value itself otherwise."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(a: HiddenRecord, b: HiddenRecord) -> None:
    for field in fields(a):
        assert bits(getattr(a, field.name)) == bits(getattr(b, field.name)), field.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_put_is_what_is_got_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    store = DiskStore(tmp_path)
    records = [made_record(f"r.{i}-x_{i}", length=5 + i, dtype=dtype) for i in range(3)]
    for record in records:
        store.put(record)
    assert store.ids() == [r.id for r in records]
    for record in records:
        assert_same(DiskStore(tmp_path).get(record.id), record)


def test_bf16_patterns_survive_including_negative_zero_and_subnormals(tmp_path: Path) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[torch.isfinite(patterns)]
    rows = finite[: len(finite) // 16 * 16].view(-1, 16)
    record = made_record(length=len(rows))
    taps = rows.unsqueeze(1).expand(-1, 3, -1)  # not contiguous: a store must not care
    store = DiskStore(tmp_path)
    store.put(replace(record, final=rows, taps=taps))
    assert_same(store.get(record.id), replace(record, final=rows, taps=taps.contiguous()))


def test_putting_again_replaces_the_whole_record(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(made_record("one", length=12))
    store.put(made_record("one", length=6))
    assert_same(store.get("one"), made_record("one", length=6))
    assert store.health() == {"records": 1, "bytes": (tmp_path / "one.safetensors").stat().st_size}


def rewrite(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """A sound safetensors file with other content, as another program could have left it."""

    def damage(path: Path) -> None:
        with safe_open(str(path), framework="pt") as file:
            meta = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, meta)

    return damage


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def shorten(tensors: dict[str, Tensor]) -> None:
    tensors["taps"] = tensors["taps"][3:].contiguous()


def poison(tensors: dict[str, Tensor]) -> None:
    tensors["final"][2, 2] = float("nan")


def with_metadata(meta: dict[str, str]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        save_file(load_file(path), path, meta)

    return damage


def cut(keep: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * keep))


def fill(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


SOUND = {"id": "one", "category": "c", "temperature": 0.0, "layer_ids": [1, 4, 7]}
DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": lambda path: path.unlink(),
    "empty": cut(0),
    "half": cut(0.5),
    "last byte missing": lambda path: os.truncate(path, path.stat().st_size - 1),
    "another format": fill(b"{" * 500),
    "taps absent": rewrite(drop("taps")),
    "greedy absent": rewrite(drop("greedy")),
    "taps shortened": rewrite(shorten),
    "NaN": rewrite(poison),
    "no description": with_metadata({}),
    "description not JSON": with_metadata({"record": "{"}),
    "description not ours": with_metadata({"record": "[1, 2]"}),
    "norm state missing": with_metadata({"record": json.dumps(SOUND)}),
    "other layers": with_metadata(
        {"record": json.dumps({**SOUND, "layer_ids": [1, 4], "norm_state": "post"})}
    ),
    "layers not a list": with_metadata(
        {"record": json.dumps({**SOUND, "layer_ids": 3, "norm_state": "post"})}
    ),
    "another record's file": with_metadata(
        {"record": json.dumps({**SOUND, "id": "two", "norm_state": "post"})}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_its_own_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = DiskStore(tmp_path)
    store.put(made_record("one"))
    damage(tmp_path / "one.safetensors")
    with pytest.raises(DamagedArtifactError) as caught:
        store.get("one")
    assert "one" in caught.value.where


def test_an_unsound_record_is_not_written(tmp_path: Path) -> None:
    record = made_record("one")
    store = DiskStore(tmp_path)
    with pytest.raises(DamagedArtifactError):
        store.put(replace(record, taps=record.taps[1:]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "../up", "/etc/passwd", ".hidden", "..", "a\0b"])
def test_ids_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "states"
    folder.mkdir()
    store = DiskStore(folder)
    with pytest.raises(DataError):
        store.put(made_record(name))
    with pytest.raises(DataError):
        store.get(name)
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    assert list(folder.iterdir()) == []


def test_half_written_files_are_never_listed_and_gc_removes_only_them(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(made_record("one"))
    half = (tmp_path / "one.safetensors").read_bytes()[:100]
    (tmp_path / ".dspark-0123456789abcdef.partial").write_bytes(half)
    (tmp_path / ".two.safetensors").write_bytes(half)
    (tmp_path / ".keep").touch()  # somebody else's
    (tmp_path / "notes.txt").touch()
    assert store.ids() == ["one"]
    assert store.health()["records"] == 1
    assert store.gc() == 1
    assert store.gc() == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"one.safetensors", ".two.safetensors", ".keep", "notes.txt"}
    assert_same(store.get("one"), made_record("one"))


def test_an_absent_folder_is_a_storage_error_for_writers_and_empty_for_readers(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path / "nowhere")
    assert store.ids() == []
    with pytest.raises(StorageError):
        store.put(made_record())
