"""docs/formats.md against the code: every field we write is described, and none that we do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from dspark.artifacts import Manifest
from dspark.artifacts.made import Attempt, Made
from dspark.artifacts.manifest import FileEntry, Parent
from dspark.artifacts.record import Done, StageRecord
from dspark.bench.curves import Evaluation, Training, TrainingStep
from dspark.bench.figures.comparison import (
    Comparison,
    Divergence,
    Identity,
    Overall,
    PairFigures,
)
from dspark.bench.figures.schema import (
    Acceptance,
    ArmFigures,
    PromptRow,
    Quality,
    SpeedFigures,
    Spread,
    SuiteResults,
)
from dspark.bench.play.turn import Accepted, Turn
from dspark.bench.play.turn import Answer as SuiteAnswer
from dspark.bench.results import Bench, BenchArm, Lineage, LineageEntry, Summary, SummaryResult
from dspark.checkpoint.calibration import BinFigures, CalibratedMode, Calibration, SlotFigures
from dspark.checkpoint.published import FIXED, FORBIDDEN, INERT
from dspark.checkpoint.tensorfile import ITEM_BYTES
from dspark.config.architecture import K3DraftConfig, Qwen3DraftConfig, RopeParameters
from dspark.data.answer_report import AnswerCategory, AnswerMaker, AnswerReport
from dspark.data.prompt import Prompt
from dspark.data.prompt_report import (
    CategoryReport,
    Cluster,
    ContaminationReport,
    DuplicateReport,
    FunnelStep,
    HitReport,
    PromptReport,
    SourceReport,
)
from dspark.hidden.answers import Answer, Counts, Generation, Sampling
from dspark.hidden.disk import _TENSORS

TEXT = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", TEXT))


def section(title: str) -> set[str]:
    """Names in code marks of one section."""
    body = re.split(r"^#{2,3} ", TEXT, flags=re.MULTILINE)
    found = [part for part in body if part.startswith(f"{title}\n")]
    assert len(found) == 1, title
    return set(re.findall(r"`([^`\n]+)`", found[0]))


@pytest.mark.parametrize(
    ("title", "models"),
    [
        ("manifest.json", [Manifest, Parent, FileEntry, Made, Attempt, StageRecord, Done]),
        (
            "Prompts",
            [
                Prompt,
                PromptReport,
                SourceReport,
                FunnelStep,
                CategoryReport,
                Cluster,
                DuplicateReport,
                ContaminationReport,
                HitReport,
            ],
        ),
        ("calibration.json", [Calibration, CalibratedMode, SlotFigures, BinFigures]),
        (
            "Answers",
            [Answer, Generation, Sampling, Counts, AnswerReport, AnswerCategory, AnswerMaker],
        ),
        ("training.json", [Training, TrainingStep, Evaluation]),
        (
            "bench.json, results.json, summary.json, lineage.json",
            [Bench, BenchArm, SummaryResult, Summary, Lineage, LineageEntry],
        ),
        (
            "Results of suites",
            [
                SuiteResults,
                ArmFigures,
                Acceptance,
                SpeedFigures,
                Spread,
                Quality,
                PromptRow,
                Turn,
                SuiteAnswer,
                Accepted,
                Comparison,
                PairFigures,
                Overall,
                Identity,
                Divergence,
            ],
        ),
    ],
)
def test_every_field_of_our_files_is_described(title: str, models: list[type[BaseModel]]) -> None:
    told = section(title)
    for model in models:
        missing = sorted(set(model.model_fields) - told)
        assert not missing, f"{model.__name__} has {missing}, docs/formats.md does not"


@pytest.mark.parametrize("config", [K3DraftConfig, Qwen3DraftConfig])
def test_every_field_of_config_json_is_described(config: type[K3DraftConfig]) -> None:
    told = section("config.json")
    sizes = {name: 4 for name, field in config.model_fields.items() if field.is_required()}
    made = config(**(sizes | {"target_layer_ids": (1,), "mask_token_id": 1}))
    assert set(made.to_json()) <= told
    assert set(RopeParameters.model_fields) <= told


def test_every_rule_of_the_reader_is_described() -> None:
    told = section("config.json")
    assert set(FORBIDDEN) <= told
    assert set(FIXED) <= told
    assert set(INERT) <= told
    assert set(_TENSORS) <= section("Hidden records")
    names = re.search(r"^\| dtype \| (.*) \|$", TEXT, re.MULTILINE)
    sizes = re.search(r"^\| bytes \| (\d[\d |]*) \|$", TEXT, re.MULTILINE)
    assert names is not None
    assert sizes is not None
    table = zip(names[1].split(" | "), map(int, sizes[1].split(" | ")), strict=True)
    assert list(table) == list(ITEM_BYTES.items())


def test_every_key_of_provenance_is_described(tiny_run: Path) -> None:
    from dspark.checkpoint.published import read_config

    _, provenance = read_config(tiny_run / "draft")
    told = section("dspark_provenance")
    assert set(provenance) <= told
    for file in ("exported_by", "exported_from_sha256", "start", "target_embedding_sha256"):
        assert file in told


def test_every_module_the_page_names_exists() -> None:
    for name in NAMED:
        match = re.fullmatch(r"(dspark(?:\.[a-z_]+)+)(?:[.:](\w+))?", name)
        if match is None:
            continue
        module = match[1].split(".")
        where = Path(__file__).parent.parent / "src" / Path(*module)
        assert where.with_suffix(".py").is_file() or where.is_dir(), name
        if match[2]:
            assert match[2] in where.with_suffix(".py").read_text(encoding="utf-8"), name
