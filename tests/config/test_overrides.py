"""``key=value`` behind a verb: applied before validation, and refused with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from minimal_recipe import refusal, write

from dspark.config.load import load_recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_overrides_are_applied_before_validation(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "train.learning_rate=3e-3",
            "train.loss.decay=7",
            "prompts.sources.0.train=10",
            "bench.temperatures=[0, 0.5]",
            "target.revision=null",
            "draft.target_layer_ids=[1,4]",
            "output='runs/a=b'",
        ],
    )
    assert recipe.train.learning_rate == 3e-3
    assert recipe.train.loss.decay == 7.0
    assert recipe.prompts.sources[0].model_dump()["train"] == 10
    assert recipe.bench.temperatures == (0.0, 0.5)
    assert recipe.draft.target_layer_ids == (1, 4)
    assert recipe.output == "runs/a=b"


def test_an_override_can_repair_a_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path, train={"batch_size": 0})
    recipe = load_recipe(path, ["train.batch_size=2", "train.batch_size=4"])
    assert recipe.train.batch_size == 4


def test_a_bad_value_is_traced_to_its_override(recipe_file: Path) -> None:
    error = refusal(recipe_file, "train.batch_size=0")
    assert error.where == f"{recipe_file}: train.batch_size (set by an override)"
    assert error.found == "train.batch_size: 0 (must be greater than 0)"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.learning_rat=1", "learning_rate"),
        ("trian.epochs=1", "train"),
        ("train.loss.decy=1", "decay"),
        ("prompts.sources.0.trai=1", "train"),
        ("prompts.sources.1.train=1", "kind"),
        ("prompts.sources.2.train=1", "0 to 1"),
        ("prompts.sources.-1.train=1", "0 to 1"),
        ("prompts.sources.first.train=1", "0 to 1"),
        ("bench.temperatures.0=1", "bench.temperatures as a whole"),
        ("train.epochs.x=1", "train.epochs as a whole"),
        ("zzz=1", "Choose one of: name, output"),
        ("max_new_tokens=8", "Did you mean regenerate.max_new_tokens or bench.max_new_tokens?"),
        ("train.decay=7", "Did you mean train.loss.decay?"),
        ("train.epochs", "train.epochs=2"),
        ("train.epochs=", "=null"),
        ("=3", "train.epochs=2"),
        ("train..epochs=3", "train.epochs=2"),
        ("bench.temperatures=[1,2", "quote"),
        ("target.source=a: b: c", "quote"),
    ],
)
def test_overrides_that_name_nothing_are_refused(
    recipe_file: Path, override: str, hint: str
) -> None:
    error = refusal(recipe_file, override)
    assert error.where.startswith(f"override {override!r}")
    assert hint in error.fix


def test_an_override_below_a_section_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, train=5), "train.epochs=1")
    assert "train is 5, not a mapping" in error.found


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        (
            "train.batch_size=0",
            "Write the override as train.batch_size=VALUE; VALUE must be greater than 0, for "
            "example train.batch_size=8.",
        ),
        (
            "bench.temperatures=[]",
            "Write the override as bench.temperatures=VALUE; VALUE must have at least 1 item, for "
            "example bench.temperatures=[0.0,1.0].",
        ),
        ("train.mode=onlin", "Did you mean online or offline?"),
        ("prompts.sources.0.kind=order_ticket", "Did you mean order_tickets?"),
    ],
)
def test_the_fix_of_an_override_says_which_what_is_allowed_and_an_example(
    recipe_file: Path, override: str, fix: str
) -> None:
    assert refusal(recipe_file, override).fix == fix
