"""The plan of a cluster on paper: facts against arithmetic by hand, and what changes with what."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from conftest import dspark
from dspark.cli.scale_plan import Weights, scale_plan
from dspark.config.load import load_recipe
from dspark.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "kimi-k3.yaml"


def changed(tmp_path: Path, **fields) -> Path:
    raw = yaml.safe_load(RECIPE.read_text())
    raw["serving"] |= fields
    path = tmp_path / "kimi-k3.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_parameters_are_those_of_the_published_model() -> None:
    plan = scale_plan(RECIPE)
    assert plan.parameters == pytest.approx(2.8e12, rel=0.01)
    assert plan.active == pytest.approx(104e9, rel=0.02)
    recipe = load_recipe(RECIPE)
    assert recipe.serving is not None
    weights = Weights.of(recipe.serving.target)
    assert weights.experts == 92 * 896 * 3 * 3584 * 3072
    assert weights.embedding == 163840 * 7168


def test_rows_states_and_traffic_are_arithmetic() -> None:
    plan = scale_plan(RECIPE)
    assert plan.row_bytes == (24 + 5) * (576 + 4)
    assert plan.draft_row_bytes == 5 * 580
    assert plan.state_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    assert plan.transfer == 8192 * plan.row_bytes + plan.state_bytes
    assert plan.transfer_ms == pytest.approx(plan.transfer * 8 / 400e9 * 1e3)
    assert plan.hidden_states_ratio == pytest.approx(5 * 7168 * 2 / 2900)


def test_what_a_gpu_holds_adds_up() -> None:
    plan = scale_plan(RECIPE)
    assert [share.gpus for share in plan.shares] == [8, 16]
    for share in plan.shares:
        whole = share.target + share.draft + share.states + share.left
        assert whole == pytest.approx((288 - 24) * 1e9)
        assert share.tokens == share.left // plan.row_bytes
        assert share.draft * share.gpus == 3_562_312_961 * 2
    assert plan.shares[0].target == pytest.approx(2 * plan.shares[1].target)


def test_speed_up_is_the_formula_and_follows_acceptance() -> None:
    for share in scale_plan(RECIPE).shares:
        for tau, speedup in share.speedup.items():
            wanted = float(tau) * share.step_ms / (share.verify_ms + share.draft_ms)
            assert speedup == pytest.approx(wanted, abs=0.01)


def test_assumptions_move_the_figures_the_way_they_should(tmp_path: Path) -> None:
    base = scale_plan(RECIPE).shares[0]
    wide = scale_plan(changed(tmp_path, rows="bfloat16")).shares[0]
    assert base.tokens / wide.tokens == pytest.approx(2 * 576 / 580)
    slow = scale_plan(changed(tmp_path, bandwidth_share=0.3)).shares[0]
    assert slow.step_ms > 1.5 * base.step_ms
    one = scale_plan(changed(tmp_path, requests=1)).shares[0]
    assert one.verify_ms < base.verify_ms
    assert one.speedup["3.85"] > base.speedup["3.85"] / 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GPUs"):
        scale_plan(changed(tmp_path, device_gb=192))
    with pytest.raises(ConfigError, match="serving"):
        scale_plan(ROOT / "recipes" / "quickstart.yaml")
    raw = yaml.safe_load(RECIPE.read_text())["serving"]["target_config"]
    with pytest.raises(ConfigError, match="MLA"):
        scale_plan(changed(tmp_path, target_config={**raw, "model_type": "qwen3",
                                                    "hidden_act": "silu"}))  # fmt: skip


def test_the_command_prints_it_and_the_page_agrees() -> None:
    done = dspark("serve", str(RECIPE), "--plan")
    assert done.returncode == 0, done.stderr
    assert "nothing was run" in done.stdout
    found = json.loads(dspark("serve", str(RECIPE), "--plan", "--json").stdout)
    page = (ROOT / "docs" / "kimi-k3.md").read_text()
    numbers = {n.replace(",", "") for n in re.findall(r"[\d,]+\d", page)}
    assert str(found["row_bytes"]) in numbers
    assert str(found["draft_row_bytes"]) in numbers
    for text in (f"{found['state_bytes'] / 1e6:.0f} MB", f"{found['hidden_states_ratio']:.1f} times",
                 f"{found['transfer_ms']:.1f} ms", f"{found['parameters'] / 1e9:,.0f} billion"):  # fmt: skip
        assert text in page, text
