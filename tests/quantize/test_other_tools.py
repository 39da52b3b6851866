"""The same draft by llm-compressor and by AMD Quark: the same tensors, scales and codes.

Both divide in the checkpoint's own dtype, and llm-compressor also stores scales in it; dspark divides
in float32. So on a float32 draft all three agree in every byte, and on a bfloat16 one the others'
codes are those of a quotient rounded twice: now and then the second nearest. That is measured here,
not tolerated: their codes must be exactly what their arithmetic gives, and ours nearest.

They need their own environment (`make quantizers-env`); without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import made_fp8
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.checkpoint.quantization import is_ignored

HERE = Path(__file__).parent
VARIABLE = "DSPARK_QUANTIZERS_PYTHON"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(tool: str, folder: Path, patterns: list[str]) -> dict[str, Tensor]:
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else HERE.parents[1] / ".venv-quantizers" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"nothing at {python}: run `make quantizers-env` or set {VARIABLE}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(HERE / "judge_other_tools.py"), str(folder), tool, *patterns],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / tool / "model.safetensors")


@pytest.fixture(scope="module", params=[*DTYPES])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    made_fp8.source(folder / "source", dtype=DTYPES[request.param])
    made_fp8.convert(folder / "source", folder / "out")
    return folder


def ours(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Source, our FP8 draft, and its ignore list."""
    raw: dict[str, Any] = json.loads((folder / "out" / "config.json").read_text())
    source, out = (load_file(folder / n / "model.safetensors") for n in ("source", "out"))
    return source, out, raw["quantization_config"]["ignore"]


def check(source: dict[str, Tensor], out: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Codes of their own arithmetic, ours nearest; everything else byte for byte."""
    codes = {n for n, t in out.items() if t.dtype == torch.float8_e4m3fn}
    assert {n for n, t in theirs.items() if t.dtype == torch.float8_e4m3fn} == codes
    assert set(theirs) == set(out)
    for name in sorted(set(out) - codes):
        if not name.endswith("_scale"):
            assert torch.equal(theirs[name], out[name]), name
    for name in codes:
        weight, scale = source[name], out[f"{name}_scale"]
        own = (weight / scale.to(weight.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(theirs[name].float(), own.float()), name
        exact = weight.float() / scale
        error = (out[name].float() - exact).abs()
        assert (error <= (theirs[name].float() - exact).abs()).all(), name
        if weight.dtype == torch.float32:
            assert torch.equal(theirs[name].float(), out[name].float()), name


def test_llm_compressor_makes_the_same_tensors_with_scales_rounded_to_the_drafts_dtype(
    made: Path,
) -> None:
    source, out, ignore = ours(made)
    theirs = run("compressor", made, ignore)
    check(source, out, theirs)
    for name, tensor in theirs.items():
        if name.endswith("_scale"):
            dtype = source[name.removesuffix("_scale")].dtype
            assert torch.equal(tensor, out[name].to(dtype)), name


def test_quark_makes_the_same_tensors_with_exactly_our_scales_in_another_shape(made: Path) -> None:
    source, out, ignore = ours(made)
    # Quark's patterns are a shell's, without alternatives: every left-out linear by its name.
    linears = [n.removesuffix(".weight") for n, t in source.items() if t.dim() == 2]
    theirs = run("quark", made, [name for name in linears if is_ignored(name, ignore)])
    check(source, out, theirs)
    for name, tensor in theirs.items():
        if name.endswith("_scale"):
            assert torch.equal(tensor.unsqueeze(1), out[name]), name
