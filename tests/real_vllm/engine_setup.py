"""Programs of this folder run inside the vLLM environment; this is what they share.

They never import dspark unless its plugin is what they run: files go in, files come out, so that
nothing of ours can leak into the judgement. Three things of vLLM are changed, and nothing else unless a program says so:

* the CPU distribution only has the V1 runner, which refuses ``method: dspark`` as a whole; that one
  entry of the refusal list is dropped, because configuration and model classes are what is judged
  here, not the runner;
* ``torch.accelerator.empty_cache`` does nothing, as vLLM's own CPU runner arranges it;
* RMSNorm with one row of weights per draft layer, which context rows go through. The CUDA kernel
  takes row i for layer i (vLLM pull request 46761); the CPU kernel of 0.32.0 takes row 0 for all of
  them, as the XPU kernel did (pull request 56431). :func:`mend_grouped_norm` calls it row by row.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

REFUSED_BY_V1 = "dspark speculative decoding"


def job_folder() -> Path:
    """The folder named on the command line: ``target``, ``draft`` and inputs lie in it."""
    return Path(sys.argv[1])


def engine_config(target: Path, draft: Path, **speculative: Any) -> VllmConfig:
    """What ``vllm serve TARGET --speculative-config {...}`` would build, in fp32 and eager."""
    arguments = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        speculative_config={"model": str(draft), "method": "dspark", **speculative},
    )
    return arguments.create_engine_config()


def let_v1_pass() -> None:
    """Drop the one refusal named in the module docstring; others stay."""
    refusals = VllmConfig._get_v1_model_runner_unsupported_features

    def without_dspark(self: VllmConfig) -> list[str]:
        return [feature for feature in refusals(self) if feature != REFUSED_BY_V1]

    VllmConfig._get_v1_model_runner_unsupported_features = without_dspark


def mend_grouped_norm() -> float:
    """Mend it and return how wrong the CPU kernel was (0 when a later vLLM needs no mending)."""
    kernel = _custom_ops.rms_norm

    def row_by_row(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
        if weight.dim() == 1:
            return kernel(out, x, weight, epsilon)
        for i, row in enumerate(weight):
            part = torch.empty_like(x[i])
            kernel(part, x[i].contiguous(), row, epsilon)
            out[i] = part
        return None

    x, weight = torch.randn(2, 3, 32), torch.tensor([[1.0], [2.0]]).expand(2, 32).contiguous()
    plain, mended = torch.empty_like(x), torch.empty_like(x)
    kernel(plain, x, weight, 1e-6)
    row_by_row(mended, x, weight, 1e-6)
    _custom_ops.rms_norm = row_by_row
    return float((plain - mended).abs().max())


@contextmanager
def single_process(config: VllmConfig) -> Iterator[None]:
    """A distributed world of one process, in which vLLM's layers can be built and run."""
    torch.accelerator.empty_cache = lambda: None
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
            backend="gloo",
        )
        initialize_model_parallel()
        yield


def write_answer(folder: Path, answer: dict[str, Any]) -> None:
    (folder / "answer.json").write_text(json.dumps(answer, indent=1), encoding="utf-8")
