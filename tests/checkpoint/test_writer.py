"""Our safetensors writer: byte for byte the library's files, in pieces, in shards, whole or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import Tensor

from dspark.checkpoint.shards import INDEX, WEIGHTS, open_weights
from dspark.checkpoint.tensorfile import PIECE
from dspark.checkpoint.tensors import FORMAT_NAMES, TORCH_DTYPES, as_tensor
from dspark.checkpoint.writer import TensorSpec, Written, tensor_pieces, write_weights

NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\\'), min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from([d for d in TORCH_DTYPES.values() if d != torch.bool])


def write(folder: Path, tensors: dict[str, Tensor], **options: object) -> Written:
    specs = [TensorSpec(n, FORMAT_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return write_weights(
        folder, specs, lambda s: tensor_pieces(tensors[s.name], tensors[s.name].dtype), **options
    )  # type: ignore[arg-type]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), min_size=1, max_size=6))
def test_files_are_the_librarys_byte_for_byte(
    tmp_path: Path, made: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    made.pop("__metadata__", None)
    tensors = {n: torch.randn(s).mul(50).to(d) for n, (d, s) in made.items()}
    written = write(tmp_path, tensors)
    content = (tmp_path / WEIGHTS).read_bytes()
    assert content == save(tensors, {"format": "pt"})
    assert written.files == {
        WEIGHTS: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    }


def test_pieces_of_a_large_tensor_join_and_cast(tmp_path: Path) -> None:
    tensor = torch.randn(PIECE // 2 + 77)
    pieces = [len(p) for p in tensor_pieces(tensor, torch.bfloat16)]
    assert pieces == [PIECE, 154]
    told: list[int] = []
    spec = TensorSpec("a", "BF16", tuple(tensor.shape))
    written = write_weights(
        tmp_path,
        [spec],
        lambda _: tensor_pieces(tensor, torch.bfloat16),
        hashed=frozenset({"a"}),
        on_bytes=told.append,
    )
    loaded = load_file(tmp_path / WEIGHTS)["a"]
    assert loaded.equal(tensor.to(torch.bfloat16))
    raw = loaded.view(torch.uint8).numpy().tobytes()
    assert written.digests == {"a": hashlib.sha256(raw).hexdigest()}
    assert sum(told) == (tmp_path / WEIGHTS).stat().st_size


@pytest.mark.parametrize("limit", [1, 100, 400, 10_000])
def test_shards_hold_every_tensor_once_and_keep_the_limit(tmp_path: Path, limit: int) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(5, 5) for i in range(7)}  # 100 bytes each
    written = write(tmp_path, tensors, max_shard_bytes=limit)
    assert len(written.files) == {1: 7, 100: 7, 400: 2, 10_000: 1}[limit]
    if len(written.files) == 1:
        assert list(written.files) == [WEIGHTS]
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_parameters": 175, "total_size": 700}
        assert set(index["weight_map"].values()) == set(written.files)
        assert not (tmp_path / WEIGHTS).exists()
    weights = open_weights(tmp_path)
    for name, tensor in tensors.items():
        assert as_tensor(weights.entries[name], weights.read(name)).equal(tensor)


def test_a_source_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def short(_: TensorSpec) -> Iterator[bytes]:
        yield b"1234"

    def breaks(_: TensorSpec) -> Iterator[bytes]:
        yield b"1234"
        raise KeyboardInterrupt

    spec = TensorSpec("a", "F32", (2,))
    with pytest.raises(ValueError, match="4 bytes written, not 8"):
        write_weights(tmp_path, [spec], short)
    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path, [spec], breaks)
    assert list(tmp_path.iterdir()) == []
