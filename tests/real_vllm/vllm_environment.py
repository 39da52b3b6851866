"""Find the vLLM environment, and run a program of this folder in it.

vLLM pins its own torch and transformers, so it lives apart: ``make vllm`` creates ``.venv-vllm``
and ``DSPARK_VLLM_PYTHON`` names the interpreter of another one. Without either, tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
VARIABLE = "DSPARK_VLLM_PYTHON"


def vllm_python() -> Path:
    """The interpreter; skips the calling test, with the reason, when there is none."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else HERE.parents[1] / ".venv-vllm" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no vLLM environment at {python}: run `make vllm` or set {VARIABLE}")
    return python


@dataclass(frozen=True)
class Verdict:
    """What a program wrote: ``answer`` as JSON and ``outputs`` as tensors."""

    answer: dict[str, Any]
    outputs: dict[str, Tensor]


def environment(*, plugin: bool) -> dict[str, str]:
    """Variables for a process of that environment; with ``plugin`` it runs this checkout's dspark,
    without it nothing of dspark can be imported by accident."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE.parents[1] / "src"),
        "VLLM_PLUGINS": "dspark",
    }
    if not plugin:
        del variables["PYTHONPATH"]
        variables["VLLM_PLUGINS"] = ""
    return variables


def judge(
    program: str, folder: Path, inputs: dict[str, Tensor] | None = None, *, plugin: bool = False
) -> Verdict:
    """Run ``program`` on ``folder`` (with ``target`` and ``draft`` in it) and read its verdict."""
    python = vllm_python()
    if inputs:
        save_file({n: t.contiguous() for n, t in inputs.items()}, folder / "inputs.safetensors")
    done = subprocess.run(
        [str(python), str(HERE / program), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(plugin=plugin),
        check=False,
    )
    assert done.returncode == 0, f"{program} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    outputs = folder / "outputs.safetensors"
    return Verdict(
        json.loads((folder / "answer.json").read_text(encoding="utf-8")),
        load_file(outputs) if outputs.is_file() else {},
    )
