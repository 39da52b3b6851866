"""A target as other engines read it: a folder of safetensors with config and tokenizer.

Targets that are one already, and hub ids, are handed on as they are. A GGUF is written out once by
transformers, dequantized, in the dtype that is asked for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from dspark.checkpoint.pretrained import read_config, read_model, read_tokenizer
from dspark.checkpoint.source import TargetFiles

DONE = "complete"


def safetensors_source(files: TargetFiles, folder: Path, dtype: torch.dtype) -> str:
    """A folder or hub id that has safetensors; ``folder`` is only written for a GGUF.

    Raises:
        TargetError: unreadable or incomplete.
        MissingDependencyError: reading it needs an optional package.
    """
    if files.gguf is None:
        return files.location
    if not (folder / DONE).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(files, partial, dtype)
            (partial / DONE).touch()
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return str(folder)


def _write(files: TargetFiles, folder: Path, dtype: torch.dtype) -> None:
    tokenizer = read_tokenizer(files)
    model = read_model(files, read_config(files), dtype)
    # It says how the GGUF was quantized; the weights written here are not.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
