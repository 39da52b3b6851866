"""The scheduler's simulator runs as its page says and shows what it is there to show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "schedule_sim.py"
NAMES = ["fixed", "threshold", "sync", "async", "oracle"]


@pytest.mark.slow
def test_the_simulator_shows_load_cliffs_and_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"],
        capture_output=True, text=True, env=environment(), check=True, timeout=250,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["scheduling_us_512x7"] > 0
    assert set(found["curves"]) == {"smooth", "jagged", "h200", "measured"}
    requests = found["requests"]
    assert requests[0] == 1
    assert requests[-1] == 4096
    for curve, rows in found["curves"].items():
        assert list(rows) == NAMES
        assert all(len(rows[name]) == len(requests) for name in NAMES)
        for name in NAMES:
            pairs = zip(rows[name], rows["oracle"], strict=True)
            assert all(rate <= 1.02 * limit for rate, limit in pairs), (curve, name)
    admitted = found["admitted"]["smooth"]["sync"]
    assert admitted[4] > 2 * admitted[8] > 4 * admitted[12]
    jagged = found["curves"]["jagged"]
    at = requests.index(64)
    assert jagged["async"][at] > 1.1 * jagged["sync"][at], "sync is not trapped by the cliff"
    assert found["curves"]["smooth"]["sync"][-1] > 3 * found["curves"]["smooth"]["fixed"][-1]
