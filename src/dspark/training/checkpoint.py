"""Training state on disk: everything a resumed run needs to equal an uninterrupted one.

One file, replaced atomically: trainable weights, optimiser moments, step, planned length and the
measured history. A killed run loses at most the steps since the last file.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.artifacts import atomic_write
from dspark.errors import DamagedArtifactError

FILE = "resume.pt"
_UNUSABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError,
             pickle.UnpicklingError, zipfile.BadZipFile)  # fmt: skip


@dataclass
class TrainingState:
    """``step`` optimiser steps are done of ``total``; ``seconds`` of training time were used.

    ``progress`` is the place in the schedule, from 0 to 1 (``dspark.training.pace``).
    """

    step: int
    total: int
    seconds: float
    progress: float
    history: dict[str, list[dict[str, Any]]]


def save_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write ``folder/resume.pt``."""
    buffer = io.BytesIO()
    trainable = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    torch.save(
        {"weights": trainable, "optimizer": optimizer.state_dict(), "state": vars(state)}, buffer
    )
    atomic_write(folder / FILE, buffer.getvalue())


def load_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainingState | None:
    """Restore into ``module`` and ``optimizer``; None when there is nothing to resume.

    Raises:
        DamagedArtifactError: the file is there but cannot be used with this model.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as content:
            # torch itself loads a flipped bit without a word.
            if content.testzip() is not None:
                raise ValueError("a checksum does not match")
        raw = torch.load(path, weights_only=True)
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if set(parameters) != set(raw["weights"]):
            raise KeyError("other parameter names")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if raw["weights"][name].shape != parameter.shape:
                    raise ValueError(f"{name} has another shape")
                parameter.copy_(raw["weights"][name])
        optimizer.load_state_dict(raw["optimizer"])
        return TrainingState(**raw["state"])
    except _UNUSABLE as error:
        raise DamagedArtifactError(
            expected="a training state of this recipe",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            where=str(path),
            fix="Delete the file to train from the start.",
        ) from error
