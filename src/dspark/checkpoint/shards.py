"""The weights of a checkpoint folder: one file, or several with an index.

``model.safetensors`` alone, or ``model.safetensors.index.json`` with ``weight_map`` (tensor name ->
file name beside it). What the index says and what the files hold must be the same: a tensor in two
files, or one that the index does not name, would be a matter of luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dspark.checkpoint.tensorfile import PIECE, TensorEntry, TensorFile, read_header
from dspark.config.load import read_json_object
from dspark.errors import CheckpointError, ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """All tensors of a folder, headers checked. ``where`` is what errors name."""

    where: str
    files: tuple[TensorFile, ...]
    entries: dict[str, TensorEntry]
    _home: dict[str, TensorFile]

    def pieces(self, name: str, size: int = PIECE) -> Iterator[bytearray]:
        """A tensor's bytes in pieces, see :meth:`TensorFile.pieces`."""
        return self._home[name].pieces(name, size)

    def read(self, name: str) -> bytearray:
        """A tensor's bytes, see :meth:`TensorFile.read`."""
        return self._home[name].read(name)


def open_weights(folder: Path) -> Weights:
    """Read and check every header of a checkpoint folder.

    Raises:
        CheckpointError: no weights, two sets of them, a malformed file, an index that disagrees.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists() and index.exists():
        _refuse(folder, f"{WEIGHTS} or {INDEX}", "both", "Remove the one that is out of date.")
    if not index.exists():
        return _collect(str(single), (read_header(single),))
    mapped = _weight_map(index)
    files = tuple(read_header(folder / name) for name in sorted(set(mapped.values())))
    weights = _collect(str(index), files)
    for name, file in mapped.items():
        if name not in weights.entries or weights._home[name].path.name != file:
            _refuse(index, f"{name} in {file}", "not there", "Copy all files of the checkpoint.")
    left = sorted(set(weights.entries) - set(mapped))
    if left:
        _refuse(index, "every tensor of the files", f"none for {left[0]}", "Export it again.")
    return weights


def _collect(where: str, files: tuple[TensorFile, ...]) -> Weights:
    entries: dict[str, TensorEntry] = {}
    home: dict[str, TensorFile] = {}
    for file in files:
        for name, entry in file.entries.items():
            if name in home:
                found = f"in {home[name].path.name} and in {file.path.name}"
                _refuse(where, f"{name} in one file", found, "Export it again.")
            entries[name], home[name] = entry, file
    return Weights(where, files, entries, home)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = read_json_object(index, "an index of weights")
    except ConfigError as error:
        _refuse(index, error.expected, error.found, "Copy the checkpoint again.")
    mapped: Any = raw.get("weight_map")
    if not isinstance(mapped, dict) or not all(_plain(file) for file in mapped.values()):
        found = repr(mapped)[:80]
        _refuse(index, "weight_map: tensor name -> file in this folder", found, "Export it again.")
    return dict(mapped)


def _plain(name: Any) -> bool:
    """A file name that stays in the folder."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not {"/", "\\", "\0"} & set(name)
    )


def _refuse(where: str | Path, expected: str, found: str, fix: str) -> NoReturn:
    raise CheckpointError(expected=expected, found=found, where=str(where), fix=fix)
