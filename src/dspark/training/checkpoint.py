"""Training state on disk: everything a resumed run needs to equal an uninterrupted one.

Alone, one file (``resume.pt``), replaced atomically: trainable weights, optimiser moments, average,
step, planned length and history. Among ranks, a folder per checkpoint (``resume/step-N``) that
``torch.distributed.checkpoint`` writes, every rank its shards, so that another number of ranks can
read it; ``resume/latest.json`` names it and is written last. A killed run loses at most the steps
since then.

Data position, anchors and the stream in flight are not stored: all of them follow from the step.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.artifacts import atomic_json, atomic_write
from dspark.errors import DamagedArtifactError
from dspark.training.optim import Average, Optimizers
from dspark.training.parallel import Solo

FILE = "resume.pt"
BEST = "best.pt"
FOLDER = "resume"
LATEST = "latest.json"
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


def trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def save_best(folder: Path, weights: dict[str, torch.Tensor], step: int) -> None:
    """Whole trainable weights as of ``step``, beside the state that resumes."""
    buffer = io.BytesIO()
    torch.save({"weights": weights, "step": step}, buffer)
    atomic_write(folder / BEST, buffer.getvalue())


@torch.no_grad()
def load_best(folder: Path, module: nn.Module, step: int) -> None:
    """Give ``module`` the weights of :func:`save_best`.

    Raises:
        DamagedArtifactError: the file is not of ``step``, or of another model.
    """
    try:
        raw = torch.load(folder / BEST, weights_only=True)
        if raw["step"] != step:
            raise ValueError(f"weights of step {raw['step']} instead of {step}")
        for name, parameter in trained_weights(module).items():
            parameter.copy_(raw["weights"][name])
    except _UNUSABLE as error:
        raise _unusable(folder / BEST, error) from error


def save_state(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    average: Average | None = None,
) -> None:
    """Write ``folder/resume.pt``."""
    buffer = io.BytesIO()
    trainable = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    content = {"weights": trainable, "optimizer": optimizer.state_dict(), "state": vars(state)}
    if average is not None:
        content["average"] = average.values
    torch.save(content, buffer)
    atomic_write(folder / FILE, buffer.getvalue())


def load_state(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
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
                if average is not None:
                    average.values[name].copy_(raw["average"][name])
        optimizer.load_state_dict(raw["optimizer"])
        return TrainingState(**raw["state"])
    except _UNUSABLE as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: BaseException) -> DamagedArtifactError:
    return DamagedArtifactError(
        expected="a training state of this recipe",
        found=f"{type(error).__name__}: {str(error)[:200]}",
        where=str(path),
        fix="Delete the file to train from the start.",
    )


# --- among ranks ---------------------------------------------------------------------------------


def _shards(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
) -> dict[str, Any]:
    """Sharded tensors by name; the optimiser's moments by the name of their weight."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    parts = optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]
    content: dict[str, Any] = {
        "weights": {n: p.detach() for n, p in module.named_parameters() if p.requires_grad},
        "optimizer": {str(i): get_optimizer_state_dict(module, p) for i, p in enumerate(parts)},
    }
    if average is not None:
        content["average"] = average.values
    return content


def save_shards(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    group: Solo,
    average: Average | None = None,
) -> None:
    """Every rank calls it; ``folder`` is one that all of them see."""
    from torch.distributed.checkpoint.state_dict_saver import save

    place = folder / FOLDER / f"step-{state.step:07d}"
    if group.rank == 0:
        # Of a run that was killed while it wrote this very one.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    group.wait()
    save(_shards(module, optimizer, average), checkpoint_id=place)
    group.wait()
    if group.rank == 0:
        atomic_json(folder / FOLDER / LATEST, {"folder": place.name, "state": vars(state)})
        for old in (folder / FOLDER).glob("step-*"):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
    group.wait()


def load_shards(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
) -> TrainingState | None:
    """As :func:`load_state`, of a state that any number of ranks wrote; every rank calls it.

    Raises:
        DamagedArtifactError: it cannot be used with this model.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    latest = folder / FOLDER / LATEST
    if not latest.exists():
        return None
    try:
        told = json.loads(latest.read_text())
        content = _shards(module, optimizer, average)
        load(content, checkpoint_id=latest.parent / told["folder"])
        parts = optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]
        for i, part in enumerate(parts):
            set_optimizer_state_dict(module, part, content["optimizer"][str(i)])
        return TrainingState(**told["state"])
    except _UNUSABLE as error:
        raise _unusable(latest, error) from error
