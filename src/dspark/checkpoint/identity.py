"""What makes a target the same target: hashes of its files, without loading it.

They go into every stage's fingerprint, so that work on another target is never taken for current,
and into a draft's provenance. Paths and file names do not count, only content and order.

Weights can be hundreds of gigabytes, and hashing must not take longer than a stage. So of a file
above 64 MiB only samples are read: its head, its last MiB, and 64 pieces of 64 KiB at even
distances, together with its size. The head is the first MiB, or the first 32 MiB of a GGUF, whose
configuration, tokenizer and template stand there. A retrained, fine-tuned or requantized file
differs nearly everywhere, so samples find it; a few bytes patched by hand between two samples would
not be found. Smaller files, and with them configuration and tokenizers, are read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dspark.checkpoint.source import TargetFiles, weight_files
from dspark.errors import TargetError

MIB = 1 << 20
WHOLE_BELOW = 64 * MIB
SAMPLES, SAMPLE_BYTES = 64, 64 << 10
CONFIGS = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.model",
    "*.tiktoken",
)
# Written by whatever saved the file last; the model is the same.
VOLATILE = frozenset({"transformers_version", "_name_or_path"})


@dataclass(frozen=True)
class FileHashes:
    """sha256 (hex). ``config`` and ``tokenizer_files`` are None for a GGUF, which holds both in
    the part of the file that ``weights`` covers whole."""

    weights: str
    config: str | None
    tokenizer_files: str | None


def file_hashes(files: TargetFiles) -> FileHashes:
    """Identity of fetched files (see :func:`dspark.checkpoint.source.fetch`).

    Raises:
        TargetError: no weights, or a config that is no JSON.
    """
    weights = hashlib.sha256()
    for path in weight_files(files):
        for piece in _pieces(path):
            weights.update(piece)
    if files.gguf is not None:
        return FileHashes(weights.hexdigest(), None, None)
    folder = Path(files.location)
    return FileHashes(weights.hexdigest(), _config_hash(folder), _tokenizer_hash(folder))


def draft_hash(folder: Path) -> str:
    """Identity of a draft checkpoint: its weights, sampled as above, and its ``config.json``.

    What stands beside them (provenance's own file list, calibration, model card) does not count.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name};".encode())
        for piece in _pieces(path):
            digest.update(piece)
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """Size, then the content or the samples of one file."""
    size = path.stat().st_size
    yield f"{size};".encode()
    with path.open("rb") as file:
        if size < WHOLE_BELOW:
            while piece := file.read(MIB):
                yield piece
            return
        head = 32 * MIB if path.suffix == ".gguf" else MIB
        for start, length in _samples(head, size):
            yield _read(file, start, length)


def _samples(head: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of what is read of a large file, in ascending order."""
    first, last = head, size - MIB
    step = (last - first - SAMPLE_BYTES) / (SAMPLES - 1)
    middle = [(first + int(i * step), SAMPLE_BYTES) for i in range(SAMPLES)]
    return [(0, head), *middle, (last, MIB)]


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _config_hash(folder: Path) -> str:
    """Of the values in both config files, not of their spelling."""
    values: list[Any] = []
    for name in CONFIGS:
        path = folder / name
        if not path.is_file():
            values.append(None)
            continue
        try:
            raw = json.loads(path.read_bytes())
            values.append({key: value for key, value in raw.items() if key not in VOLATILE})
        except (OSError, ValueError, AttributeError) as error:
            raise TargetError(
                expected="one JSON object",
                found=f"{type(error).__name__}: {error}",
                where=str(path),
                fix="Copy the target again; the file is damaged.",
            ) from error
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tokenizer_hash(folder: Path) -> str:
    """Of names and bytes: a tokenizer is spread over files of different roles."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in TOKENIZER_FILES for p in folder.glob(pattern)}):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)};".encode())
            digest.update(content)
    return digest.hexdigest()
