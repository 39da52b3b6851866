"""What a recipe may say, what is refused before a run starts, and what the refusal names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from minimal_recipe import MINIMAL, refusal, write

from dspark.config.load import load_recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def test_a_minimal_recipe_loads_with_typed_values_and_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.train.learning_rate == 5e-5
    assert recipe.prompts.workload == ("maths",)
    assert recipe.prompts.sources[0].held_out == 4
    assert recipe.bench.temperatures == (0.0, 1.0)
    assert recipe.draft.block_size == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-5", 5e-5), ("1E3", 1000.0), ("2.", 2.0), (".5", 0.5), ("1.5e+2", 150.0), ("3", 3.0)],
)
def test_every_usual_spelling_of_a_float_is_a_float(
    recipe_file: Path, text: str, value: float
) -> None:
    found = load_recipe(recipe_file, [f"train.learning_rate={text}"]).train.learning_rate
    assert found == value
    assert isinstance(found, float)


@pytest.mark.parametrize(
    ("section", "change", "key", "shown"),
    [
        ("train", {"batch_size": 0}, "train.batch_size", "0 (must be greater than 0)"),
        ("train", {"seed": -1}, "train.seed", "-1 (must be greater than or equal to 0)"),
        ("train", {"batch_size": "3"}, "train.batch_size", "'3' (must be a valid integer)"),
        ("train", {"batch_size": True}, "train.batch_size", "True (must be a valid integer)"),
        ("train", {"batch_size": 1.5}, "train.batch_size", "1.5 (must be a valid integer)"),
        ("train", {"batch_size": 2.0}, "train.batch_size", "2.0 (must be a valid integer)"),
        ("train", {"epochs": "2"}, "train.epochs", "'2' (must be a valid number)"),
        ("train", {"epochs": True}, "train.epochs", "True (must be a valid number)"),
        ("train", {"epochs": float("nan")}, "train.epochs", "nan (must be a finite number)"),
        ("train", {"learning_rate": -1e-3}, "train.learning_rate", "(must be greater than 0)"),
        ("train", {"warmup_ratio": 1.0}, "train.warmup_ratio", "1.0 (must be less than 1)"),
        ("train", {"precision": "int8"}, "train.precision", "'int8'"),
        ("train", {"loss": {"ce": 0, "l1": 0}}, "train.loss", "ce and l1 are both 0"),
        ("train", {"loss": 3}, "train.loss", "3 (must be a mapping of keys)"),
        ("target", {"source": ""}, "target.source", "at least 1 character"),
        ("target", {"device": 0}, "target.device", "0 (must be a valid string)"),
        ("regenerate", {"on_length": "cut"}, "regenerate.on_length", "'cut'"),
        ("regenerate", {"top_p": 0}, "regenerate.top_p", "0 (must be greater than 0)"),
        ("regenerate", {"turns": 0}, "regenerate.turns", "0 (must be"),
        (
            "regenerate",
            {"endpoints": [{"url": "http://a:1"}, {"url": "http://a:1/"}]},
            "regenerate",
            "names a server twice",
        ),
        (
            "regenerate",
            {"endpoints": [{"url": "host:8000"}]},
            "regenerate.endpoints.0.url",
            "host:8000",
        ),
        ("bench", {"temperatures": 1.0}, "bench.temperatures", "1.0 (must be a list)"),
        (
            "bench",
            {"temperatures": [0.0, 0.009]},
            "bench.temperatures.1",
            "0 (greedy) or at least 0.01",
        ),
        ("regenerate", {"temperatures": [0, 1e-6]}, "regenerate.temperatures.1", "0 (greedy) or"),
        ("bench", {"temperatures": [0.0, 9]}, "bench.temperatures.1", "9 (must be less than"),
        ("draft", {"mask_token_id": None}, "draft.mask_token_id", "None (must be a valid integer)"),
        ("draft", {"mask_token_id": -1}, "draft.mask_token_id", "-1 (must be greater"),
        ("draft", {"block_size": 65}, "draft.block_size", "65 (must be less than or equal to 64)"),
        ("draft", {"target_layer_ids": [1, 2, 2]}, "draft.target_layer_ids", "unique, found [1, 2"),
        ("draft", {"target_layer_ids": [-1, 2]}, "draft.target_layer_ids", "-1 is negative"),
        ("draft", {"target_layer_ids": []}, "draft.target_layer_ids", "at least one"),
        ("draft", {"target_layer_ids": [1, "2"]}, "draft.target_layer_ids.1", "'2' (must be a val"),
        (
            "draft",
            {"vocabulary_size": 64, "markov_head_type": "gated"},
            "draft.vocabulary_size",
            "markov_head_type gated cannot hold it",
        ),
        ("prompts", {"workload": ["poems"]}, "prompts.workload", "without a source: ['poems']"),
        (
            "prompts",
            {"max_prompt_tokens": 500},
            "prompts.max_prompt_tokens",
            "500 + max_new_tokens 256 = 756 exceeds target.max_context 512",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_with_their_key(
    tmp_path: Path, section: str, change: dict[str, Any], key: str, shown: str
) -> None:
    path = write(tmp_path, **{section: change})
    error = refusal(path)
    assert error.where.startswith(f"{path}: {key}")
    assert shown in error.found
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("source", "key", "shown"),
    [
        ({"kind": "word_problems", "train": "8"}, "prompts.sources.0.train", "'8' (must be"),
        ({"kind": "word_problems", "trian": 8}, "prompts.sources.0.trian", "unknown key (did you"),
        ({"kind": "file", "category": "file"}, "prompts.sources.0.path", "missing (is required)"),
        ({"kind": "file", "path": "", "category": "a"}, "prompts.sources.0.path", "'' (must have"),
        ({"kind": "poems"}, "prompts.sources.0.kind", "'poems' (must be one of order_tickets,"),
        ({"train": 8}, "prompts.sources.0.kind", "'missing'"),
        (8, "prompts.sources.0", "8 (must be a mapping of keys)"),
    ],
)
def test_a_fault_inside_a_list_names_the_index_and_never_the_union_tag(
    tmp_path: Path, source: Any, key: str, shown: str
) -> None:
    error = refusal(write(tmp_path, prompts={"sources": [source]}))
    assert error.where.endswith(f": {key}")
    assert f"{key}: {shown}" in error.found
    assert error.fix.startswith((f"Set {key} ", f"Add {key}", "Did you mean", "Leave"))


def test_all_faults_are_listed_and_the_first_gives_the_place(tmp_path: Path) -> None:
    error = refusal(
        write(tmp_path, train={"batch_size": 0, "seed": "x"}, capture={"dtype": 3}, extra=1)
    )
    assert error.where.endswith(": capture.dtype")
    for part in ("capture.dtype: 3", "train.seed: 'x'", "train.batch_size: 0 (must be", "extra:"):
        assert part in error.found
    assert "in the file; it must be" in error.fix or "Did you mean" in error.fix
    assert error.fix.endswith("Mend the 3 other faults named above too.")


def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, train={"learning_rte": 1e-3}))
    assert error.where.endswith(": train.learning_rte")
    assert "did you mean learning_rate?" in error.found
    assert "did you mean train" in refusal(write(tmp_path, trains={"epochs": 1})).found


def test_missing_sections_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty_section.yaml"
    path.write_text("name: a\noutput: b\n", encoding="utf-8")
    error = refusal(path)
    assert error.where == f"{path}: target"
    assert error.found.count("missing (is required)") == 3


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "place", "found"),
    [
        (b"", "", "an empty file"),
        (b"# only a comment\n", "", "an empty file"),
        (b"- 1\n- 2\n", "", "a list"),
        (b"just text\n", "", "a str"),
        (b"name: [a\noutput: b\n", ", line 2, column 7", "expected ',' or ']'"),
        (b"name: a\n\tb: c\n", ", line 2, column 1", "cannot start any token"),
        (b"train:\n  seed: 1\n  seed: 2\n", ", line 3, column 3", "'seed' twice"),
        (b"1: a\n", ", line 1, column 1", "1, which is not text"),
        (b"a: &x [1]\nb: *x\n", ", line 2, column 4", "an alias"),
        (b"a: &x [*x]\n", ", line 1, column 8", "an alias"),
        (b"a: !!python/object/apply:os.getcwd []\n", ", line 1, column 4", "constructor"),
        (b"a: 1\n---\nb: 2\n", ", line 2, column 1", "document"),
        (b"\xff\xfe\x00", "", "not UTF-8"),
        (b"a: \x01\n", "", "special characters"),
        (b"[" * 5000, "", "recursion"),
        (b"a: " + b"9" * 5000, "", "digits"),
    ],
)
def test_files_that_are_no_recipe_are_refused_with_line_and_column(
    tmp_path: Path, content: bytes, place: str, found: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    error = refusal(path)
    assert error.where == f"{path}{place}"
    assert found in error.found


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml").found == "no such file"
    error = refusal(tmp_path)
    assert error.found == "a folder"
    assert "recipe (.yaml)" in error.fix


@pytest.mark.parametrize("text", ["on", "010", "1:30", "1_000", "2026-01-02", "0x10"])
def test_yaml_1_1_surprises_stay_text_and_are_refused_by_numbers(
    recipe_file: Path, text: str
) -> None:
    error = refusal(recipe_file, f"train.batch_size={text}")
    assert error.found == f"train.batch_size: {text!r} (must be a valid integer)"
    assert load_recipe(recipe_file, [f"output={text}"]).output == text


def test_loading_a_recipe_imports_no_torch(recipe_file: Path) -> None:
    code = (
        "import sys; from dspark.config.load import load_recipe; import dspark.artifacts;"
        f"load_recipe({str(recipe_file)!r}); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
