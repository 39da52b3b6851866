"""``dspark calibrate`` on a real tiny run, and engines that use or refuse what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import dspark, write_prompts
from dspark.api import Engine
from dspark.artifacts import verify
from dspark.cli.calibrate import calibrate
from dspark.config.engine import EngineOptions
from dspark.decoding.params import SamplingParams
from dspark.engine.confidence import Mode
from dspark.errors import CheckpointError, DecodingError


@pytest.fixture(scope="module")
def draft(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny draft, calibrated at temperatures 0 and 1."""
    scratch = tmp_path_factory.mktemp("calibrated")
    folder = scratch / "draft"
    shutil.copytree(tiny_run / "draft", folder)
    prompts = write_prompts(scratch / "prompts.jsonl", 48)
    done = dspark(
        "calibrate", str(folder), "--prompts", str(prompts), "--json", "bench.max_new_tokens=48"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((folder / "calibration.json").read_text())
    return folder


def engine(draft: Path, target: Path, cache: Path, monkeypatch, scheduler="sync") -> Engine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return Engine(target, draft, options=EngineOptions(scheduler=scheduler, max_requests=4))


def test_the_file_says_what_was_fitted_and_how_well(draft: Path) -> None:
    made = json.loads((draft / "calibration.json").read_text())
    assert [(m["rule"], m["temperature"]) for m in made["modes"]] == [("greedy", 0), ("block", 1)]
    for mode in made["modes"]:
        slots = made["block_size"]
        assert len(mode["temperatures"]) == len(mode["before"]) == len(mode["after"]) == slots
        assert mode["blocks"] >= 50
        assert sum(b["count"] for b in mode["reliability_after"]) == slots * mode["blocks"]
    assert "<svg" in (draft / "calibration.html").read_text()
    verify(draft, "draft", deep=True)  # the artifact it lies in stays whole


def test_an_engine_uses_it_and_keeps_its_costs(
    draft: Path, tiny_target: Path, tmp_path: Path, monkeypatch
) -> None:
    first = engine(draft, tiny_target, tmp_path, monkeypatch)
    assert "calibrated for greedy T=0, block T=1" in first.banner
    modes = first.core.admission.confidence.calibrations
    assert set(modes) == {Mode("greedy", True, 0.0), Mode("block", False, 1.0)}
    (file,) = (tmp_path / "dspark" / "costs").iterdir()
    measured = json.loads(file.read_bytes())

    def started_with(factor: float) -> Engine:
        """An engine that finds the costs of the first, each of them ``factor`` times as high."""
        times = {k: [[n, s * factor] for n, s in measured[k]] for k in ("draft", "verify")}
        file.write_text(json.dumps({**measured, **times}))
        return engine(draft, tiny_target, tmp_path, monkeypatch)

    # Far from what this machine may do to a measurement while it is busy with other tests.
    again = started_with(1000.0)
    assert again.core.admission.costs.verify.seconds[0] < measured["verify"][0][1] * 100
    assert json.loads(file.read_bytes()) == {**measured, **again.core.admission.costs.as_json()}
    second = started_with(0.01)
    assert json.loads(file.read_bytes()) == {**measured, **second.core.admission.costs.as_json()}
    assert second.core.admission.costs.verify.seconds[0] == measured["verify"][0][1] * 0.01
    plain = Engine(tiny_target).generate("Tom has 3", SamplingParams(max_new_tokens=32))
    assert second.generate("Tom has 3", SamplingParams(max_new_tokens=32))[0].text == plain[0].text


def test_a_calibration_of_another_draft_or_target_is_refused(
    draft: Path, tiny_target: Path, tmp_path: Path, monkeypatch
) -> None:
    other = tmp_path / "draft"
    shutil.copytree(draft, other)
    raw = json.loads((other / "calibration.json").read_text())
    for key in ("draft", "target"):
        (other / "calibration.json").write_text(json.dumps({**raw, key: "0" * 64}))
        with pytest.raises(CheckpointError, match=f"another {key}"):
            engine(other, tiny_target, tmp_path, monkeypatch)
    (other / "calibration.json").write_text(json.dumps({**raw, "modes": [{}]}))
    with pytest.raises(CheckpointError, match="calibration"):
        engine(other, tiny_target, tmp_path, monkeypatch)
    (other / "calibration.json").unlink()
    assert "estimator" in engine(other, tiny_target, tmp_path, monkeypatch).banner


def test_too_few_blocks_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_run / "draft", folder)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    with pytest.raises(DecodingError, match="blocks"):
        calibrate(folder, prompts, None, ["bench.max_new_tokens=8"], as_json=False)
    assert not (folder / "calibration.json").exists()
