"""A target's hashes change with whatever changes its answers, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.checkpoint.identity import (
    MIB,
    SAMPLE_BYTES,
    SAMPLES,
    WHOLE_BELOW,
    FileHashes,
    _samples,
    file_hashes,
)
from dspark.checkpoint.source import find_target
from dspark.errors import TargetError


def hashes(path: Path) -> FileHashes:
    return file_hashes(find_target(str(path)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 8, "transformers_version": "5.0"}')
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (path / "model-00001-of-00002.safetensors").write_bytes(b"first")
    (path / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return path


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model-00002-of-00002.safetensors", "weights"),
        ("model.safetensors.index.json", "weights"),
        ("config.json", "config"),
        ("generation_config.json", "config"),
        ("tokenizer.json", "tokenizer_files"),
        ("tokenizer_config.json", "tokenizer_files"),
        ("chat_template.jinja", "tokenizer_files"),
        ("vocab.json", "tokenizer_files"),
    ],
)
def test_a_change_of_one_file_changes_its_own_hash_only(model: Path, name: str, part: str) -> None:
    before = hashes(model)
    (model / name).write_text('{"eos_token_id": 3}')
    after = hashes(model)
    for field in ("weights", "config", "tokenizer_files"):
        same = getattr(after, field) == getattr(before, field)
        assert same == (field != part), field


def test_place_spelling_and_unrelated_files_do_not_count(model: Path, tmp_path: Path) -> None:
    before = hashes(model)
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    (moved / "README.md").write_text("words")
    config = {"transformers_version": "6.0", "hidden_size": 8}
    (moved / "config.json").write_text(json.dumps(config, indent=4))
    assert hashes(moved) == before


def test_shards_exchanged_are_another_target(model: Path) -> None:
    before = hashes(model)
    one, two = sorted(model.glob("*.safetensors"))
    content = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[1])
    two.write_bytes(content[0])
    assert hashes(model).weights != before.weights


def test_content_that_moves_from_one_file_to_the_next_is_another_target(model: Path) -> None:
    before = hashes(model)
    one, two = sorted(model.glob("*.safetensors"))
    one.write_bytes(b"firsts")
    two.write_bytes(b"econd")
    assert hashes(model).weights != before.weights


def test_a_gguf_holds_everything_in_one_file_whose_name_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF content")
    before = hashes(tmp_path / "a.gguf")
    assert (before.config, before.tokenizer_files) == (None, None)
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    assert hashes(tmp_path / "b.gguf") == before
    (tmp_path / "b.gguf").write_bytes(b"GGUF Content")
    assert hashes(tmp_path / "b.gguf") != before


def test_every_byte_of_a_file_below_64_mib_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    content = bytearray(WHOLE_BELOW - 1)
    path.write_bytes(content)
    before = hashes(path)
    content[33 * MIB + 7] = 1  # behind a GGUF's head, between two samples if it were sampled
    path.write_bytes(content)
    assert hashes(path) != before


@pytest.mark.parametrize(("name", "head"), [("a.gguf", 32 * MIB), ("a.safetensors", MIB)])
def test_head_tail_size_and_samples_of_a_large_file_count(
    tmp_path: Path, name: str, head: int
) -> None:
    path, size = tmp_path / name, 200 * MIB
    if name == "a.safetensors":
        (tmp_path / "config.json").write_text("{}")

    def made(at: int | None, total: int = size) -> str:
        with path.open("wb") as file:  # sparse: takes no room on the disk
            file.truncate(total)
            if at is not None:
                file.seek(at)
                file.write(b"x")
        return hashes(tmp_path).weights

    seen = [
        made(None),
        made(0),
        made(head - 1),
        made(size - 1),
        made(size - MIB),
        made(None, size + 1),
    ]
    middle = _samples(head, size)[1 + SAMPLES // 2][0]
    seen += [made(middle), made(middle + SAMPLE_BYTES - 1)]
    assert len(set(seen)) == len(seen)
    assert made(middle - 1) == seen[0], "between two samples nothing is read: say so if it changes"


@pytest.mark.parametrize("size", [WHOLE_BELOW, 100 * MIB, 7_000_000_001])
@pytest.mark.parametrize("head", [MIB, 32 * MIB])
def test_samples_are_even_and_stay_inside_the_file(size: int, head: int) -> None:
    spans = _samples(head, size)
    assert spans[0] == (0, head)
    assert spans[-1] == (size - MIB, MIB)
    starts = [start for start, _ in spans[1:-1]]
    assert starts[0] == head
    assert starts[-1] + SAMPLE_BYTES <= size - MIB
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_a_config_that_is_no_json_object_is_refused(model: Path) -> None:
    for text in ("{", "[]"):
        (model / "config.json").write_text(text)
        with pytest.raises(TargetError, match=r"config\.json"):
            hashes(model)
