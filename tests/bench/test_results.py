"""Results that contradict themselves are refused when read, not discovered on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_run import made_bench, made_run, made_training
from pydantic import ValidationError

from dspark.bench.curves import Training
from dspark.bench.results import Bench, BenchArm, Summary, read_results
from dspark.config.architecture import Frozen
from dspark.errors import DamagedArtifactError, ForeignArtifactError, MissingArtifactError


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"acceptance_length": 6.5}, "1 \\+ accepted/steps"),
        ({"acceptance_length": None}, "null exactly when steps is 0"),
        ({"steps": 0}, "null exactly when steps is 0"),
        ({"admitted": 1}, "accepted <= admitted <= drafted"),
        ({"per_slot_acceptance": [0.5, 0.6]}, "never rise"),
        ({"prompt_count": 3}, "prompts holds 16"),
        ({"identical": [17, 16]}, "n <= m"),
        ({"ci95": [3.0, 2.0]}, "low to high"),
        ({"acceptance_lenght": 2.0}, "Extra inputs"),
        ({"acceptance_length": float("nan")}, "finite|greater"),
    ],
)
def test_arms_that_do_not_add_up_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        BenchArm.model_validate(made_bench()["arms"][0] | change)


def test_summary_keeps_the_published_keys_and_whole_temperatures() -> None:
    summary = made_run()[0]
    summary["results"][0]["temperature"] = 0.0
    row = json.loads(Summary.model_validate(summary).model_dump_json())["results"][0]
    assert list(row) == [
        "prompts",
        "temperature",
        "acceptance_length",
        "ci95",
        "tokens_per_second",
        "speedup",
        "identical_to_plain",
    ]
    assert isinstance(row["temperature"], int)


def test_a_category_or_a_step_given_twice_is_refused() -> None:
    bench, training, summary = made_bench(), made_training(), made_run()[0]
    bench["arms"].append(bench["arms"][0])
    training["steps"].append(training["steps"][0])
    summary["results"].append(summary["results"][0])
    for schema, content in ((Bench, bench), (Training, training), (Summary, summary)):
        with pytest.raises(ValidationError, match=r"twice|each step once"):
            schema.model_validate(content)


def test_identity_with_plain_decoding_is_refused_for_sampled_answers() -> None:
    summary = made_run()[0]
    summary["results"][1]["identical_to_plain"] = [3, 16]
    with pytest.raises(ValidationError, match="write null"):
        Summary.model_validate(summary)


def test_missing_damaged_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(MissingArtifactError):
        read_results(path, Bench)
    for content in (b'{"arms": [', b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(DamagedArtifactError):
            read_results(path, Bench)
    path.write_text('{"arms": [{"category": 3}]}', encoding="utf-8")
    with pytest.raises(ForeignArtifactError, match=r"arms\.0\.category"):
        read_results(path, Bench)


def test_results_survive_a_round_trip_through_their_file(tmp_path: Path) -> None:
    schemas: list[type[Frozen]] = [Summary, Bench, Training]
    for schema, content in zip(schemas, made_run()[:3], strict=True):
        made = schema.model_validate(content)
        path = tmp_path / "results.json"
        path.write_text(made.model_dump_json(indent=2), encoding="utf-8")
        assert read_results(path, schema) == made
