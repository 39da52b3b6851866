"""``capture.engine: vllm``: jobs for vLLM's environment, for states on disk or in a live stream."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from dspark.checkpoint.materialise import safetensors_source
from dspark.cli.context import RunContext
from dspark.cli.vllm_process import exec_module, run_module, vllm_python
from dspark.data.chat import end_ids
from dspark.hidden.rows import Teaching

MODULE = "dspark.vllm_plugin.capture"
TEACHER = "dspark.vllm_plugin.teach"


def vllm_model(run: RunContext) -> str:
    """The target's folder as vLLM reads it; a GGUF is written out once, into the run's folder.

    A hub id is the snapshot of its pinned revision by now. Raises as :func:`capture_in_vllm`.
    """
    vllm_python()  # refuses before weights are read
    precision = run.recipe.capture.precision
    dtype: torch.dtype = getattr(torch, precision)
    return safetensors_source(run.fetched_files, run.root / f"vllm-target-{precision}", dtype)


def capture_in_vllm(
    run: RunContext, store: Path, layer_ids: tuple[int, ...], on_tokens: Callable[[int], None]
) -> None:
    """Records of all answers of ``run`` below ``store``; those that are there stay.

    Raises:
        ConfigError: no environment with vLLM.
        EngineProcessError: vLLM failed; says its last words.
        TargetError: a GGUF target that cannot be written out for vLLM.
    """
    section = run.recipe.capture
    job = {
        "model": vllm_model(run),
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


def become_teacher(
    run: RunContext, teaching: Teaching, endpoints: Sequence[str], name: str | None
) -> NoReturn:
    """Become a teacher of a live stream in vLLM's environment.

    Raises:
        ConfigError, TargetError: as :func:`capture_in_vllm`.
    """
    recipe, answering = run.recipe, None
    model = vllm_model(run)
    if recipe.train.mode == "online":
        answering = {
            "section": recipe.regenerate.model_dump(mode="json"),
            "end_ids": sorted(end_ids(run.target)),
            "source": recipe.target.source,
            "revision": run.fetched_files.revision,
        }
    job = {
        "model": model,
        "capture": recipe.capture.model_dump(mode="json"),
        "answering": answering,
        "teaching": asdict(teaching),
        "longest": recipe.target.max_context,
        "endpoints": list(endpoints),
        "name": name,
        "lost_seconds": recipe.train.stream.stall_seconds,
    }
    exec_module(TEACHER, [json.dumps(job)])
