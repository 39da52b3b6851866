"""The states stage with ``capture.engine: vllm``: a job for vLLM's environment, and progress."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from dspark.checkpoint.materialise import safetensors_source
from dspark.cli.context import RunContext
from dspark.cli.vllm_process import run_module, vllm_python

MODULE = "dspark.vllm_plugin.capture"


def capture_in_vllm(
    run: RunContext, store: Path, layer_ids: tuple[int, ...], on_tokens: Callable[[int], None]
) -> None:
    """Records of all answers of ``run`` below ``store``; those that are there stay.

    Raises:
        ConfigError: no environment with vLLM.
        EngineProcessError: vLLM failed; says its last words.
        TargetError: a GGUF target that cannot be written out for vLLM.
    """
    vllm_python()  # refuses before weights are read
    section = run.recipe.capture
    dtype: torch.dtype = getattr(torch, section.precision)
    job = {
        "model": safetensors_source(
            run.fetched_files, run.root / f"vllm-target-{section.precision}", dtype
        ),
        "answers": str(run.folder("answers").absolute()),
        "store": str(store.absolute()),
        "layer_ids": list(layer_ids),
        "precision": section.precision,
        "dtype": section.dtype,
        "batch_tokens": section.batch_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        run_module(MODULE, [str(path)], lambda said: on_tokens(said["tokens"]))
