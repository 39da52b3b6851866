"""The whole Kimi-K3 draft: the contract's bytes, in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "kimi-k3.yaml"
MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "dspark", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode)
"""


def measured(*arguments: str) -> tuple[str, float]:
    """Output and peak memory in bytes of one command, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        capture_output=True,
        text=True,
        timeout=1400,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, int(done.stderr.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_seven_gigabytes_become_five_and_are_proved_in_little_memory(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 16e9:
        pytest.skip("less than 16 GB of free disk")
    draft, out = tmp_path / "draft", tmp_path / "fp8"
    try:
        measured("init", str(RECIPE), str(draft), "--embedding", "random")
        told, memory = measured("quantize", str(draft), str(out), "--json")
        assert memory < 1.5e9, f"{memory / 1e9:.2f} GB"
        totals = json.loads(told)["totals"]
        assert totals["source_bytes"] == 7_124_625_922
        assert totals["quantized_source_bytes"] == 3_942_645_760
        assert totals["code_bytes"] == 1_971_322_880
        assert totals["scale_bytes"] == 1_433_600
        assert totals["bytes"] == 5_154_736_642
        assert (totals["tensors"], totals["quantized_tensors"]) == (98, 30)
        assert totals["quantized_modules"] == 25
        proved, memory = measured("quantize", "--check", str(out), str(draft), "--json")
        assert memory < 1.5e9, f"{memory / 1e9:.2f} GB"
        assert json.loads(proved) == json.loads(told)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
